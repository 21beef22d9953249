"""What Mechanic keeps in a checkpoint: which key holds what, and how tuners and learning rates are read.

Everything is stored where PyTorch's checkpoint routes look: Delta beside the base's own state of each parameter, the
tuner in each param group. Only tensors, numbers and one string are stored, which ``torch.load(weights_only=True)`` and
``torch.distributed.checkpoint`` both accept.

===================  ==========================  ======================================================
where                key                         what
===================  ==========================  ======================================================
``state[p]``         ``mechanic_delta``          Delta, with the shape and placement of p, in float32
                                                 or more, or in bfloat16 if it is kept so; absent once
                                                 the scale is frozen
``state[p]``         ``mechanic_residual``       what rounding cut off; of half-precision p only
``param_groups[i]``  ``mechanic_format``         1, the number of this layout
``param_groups[i]``  ``mechanic_base``           the class name of the base, or of the group's optimizer
                                                 if they are several
``param_groups[i]``  ``mechanic_row``            which tuner the group belongs to
``param_groups[i]``  ``mechanic_tuner``          [15, n]: the betas, then the fields of TunerState;
                                                 earlier checkpoints lack the last two
``param_groups[i]``  ``mechanic_unit``           the peak learning rate, which counts as 1
``param_groups[i]``  ``mechanic_lr``             the learning rate of the last step
``param_groups[i]``  ``mechanic_frozen``         S, if it is frozen
``param_groups[i]``  ``mechanic_skipped``        how many steps were skipped
``param_groups[i]``  ``mechanic_own_iterates``   1, if the base steps on iterates of its own
``param_groups[i]``  ``d``                       S / peak_lr: ``d * lr`` is the effective learning rate
===================  ==========================  ======================================================

In memory, int8 codes stand under ``mechanic_delta``, and their scales beside them under ``mechanic_delta_scales``. A
checkpoint has these decoded, in float32: blocks of codes could not be sharded anew. Loading makes the same codes of it.

Every group holds a copy of its tuner, so that no checkpoint route can separate groups that share one. Groups with the
same row share one. Tuners are read in the order in which the groups have them.

A checkpoint that does not fit is refused with a ValueError that names the entry, and nothing has changed then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mechanic.tuner import TunerState, learned_rate

FORMAT = 1

DELTA = "mechanic_delta"
DELTA_SCALES = "mechanic_delta_scales"
RESIDUAL = "mechanic_residual"
STATE_KEYS = (DELTA, DELTA_SCALES, RESIDUAL)

TUNER = "mechanic_tuner"
ROW = "mechanic_row"
PEAK_LR = "mechanic_unit"
LAST_LR = "mechanic_lr"
FROZEN = "mechanic_frozen"
SKIPPED = "mechanic_skipped"
OWN_ITERATES = "mechanic_own_iterates"
GROUP_KEYS = ("mechanic_format", "mechanic_base", ROW, TUNER, PEAK_LR)
SAME = ("mechanic_format", "mechanic_base", "tuner", OWN_ITERATES)  # in a checkpoint and where it is loaded

StateDict = dict[str, Any]
Group = dict[str, Any]


def is_half_precision(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def params_of(groups: Iterable[Group]) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in groups)


def rows_of(groups: list[Group]) -> dict[int, int]:
    """The index of each row among the tuners of groups. ZeRO steps one group at a time, so rows can be missing."""
    return {row: index for index, row in enumerate(dict.fromkeys(group[ROW] for group in groups))}


# Tuners.

_ROW_OF = {name: row for row, name in enumerate(TunerState._fields, 1)}  # after the betas
_IN_UNITS_OF_LR = ("largest_rate", "rate_sum", "moved_sum")


def tuner_dtype(device: torch.device) -> torch.dtype:
    """float64 if the device has it: 1 - 0.999999 leaves one digit of a float32."""
    has_float64 = device.type != "mps"
    if device.type == "xpu":  # Intel's data-centre GPUs have it, Arc does not
        has_float64 = torch.xpu.get_device_properties(device).has_fp64
    return torch.float64 if has_float64 else torch.float32


def new_tuner(betas: tuple[float, ...]) -> Tensor:
    """Before its first step; :func:`read_tuners` moves it to where it is needed."""
    rows = [betas, *[[0.0] * len(betas)] * len(TunerState._fields)]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def as_rows(groups: list[Group], betas: Tensor, tuners: TunerState) -> list[Tensor]:
    """The tuner of every group, as it is stored."""
    index, rows = rows_of(groups), torch.stack([betas, *tuners], 1).unbind()
    return [rows[index[group[ROW]]] for group in groups]


def read_tuners(groups: list[Group], device: torch.device | None) -> tuple[Tensor, TunerState]:
    """The betas and the state of all tuners, each [tuners, n]; on ``device``, or where they are."""
    device = device or groups[0][TUNER].device  # the model may have been moved, or the checkpoint be from elsewhere
    dtype = tuner_dtype(device)
    for group in groups:
        group[TUNER] = group[TUNER].to(device, dtype)
    tuners = {group[ROW]: group[TUNER] for group in groups}
    betas, *fields = torch.stack(list(tuners.values())).unbind(1)
    return betas, TunerState(*fields)


def read_on_host(groups: list[Group]) -> TunerState:
    """The state of every group's tuner, each [groups, n]. Waits for the device."""
    return TunerState(*torch.stack([group[TUNER].cpu() for group in groups]).unbind(1)[1:])


def scale_of(group: Group) -> Tensor:
    """S, 0-dim."""
    return group[TUNER].unbind()[_ROW_OF["scales"]].sum()  # type: ignore[no-any-return]


def learned_rate_of(group: Group) -> float:
    """The mean of S."""
    return float(learned_rate(read_on_host([group]), torch)[0])


def with_all_rows(group: Group) -> Group:
    """A group of a checkpoint, whose tuner may be of before the learned rate was a mean: that then begins anew."""
    tuner = group.get(TUNER)
    if not (isinstance(tuner, Tensor) and tuner.ndim == 2 and len(tuner) == _ROW_OF["rate_sum"]):
        return group
    return {**group, TUNER: torch.cat([tuner, torch.zeros_like(tuner[:2])])}


def freeze_scales(groups: list[Group]) -> None:
    """Let S be its mean from now on."""
    for group in groups:
        learned, tuner = learned_rate_of(group), group[TUNER].clone()  # the old one may have been handed out
        tuner[_ROW_OF["scales"]] *= learned / scale_of(group)
        group.update({TUNER: tuner, FROZEN: learned})


# Learning rates.


def read_rates(groups: list[Group], like: Tensor) -> Tensor:
    """The present learning rate of every tuner, [tuners]: the largest of its groups. Does not wait for the device."""
    by_row: dict[int, list[Any]] = {}
    for group in groups:
        by_row.setdefault(group[ROW], []).append(group.get("lr"))
    largest = []
    for rates in by_row.values():
        tensors = [rate.to(like) for rate in rates if isinstance(rate, Tensor)]
        numbers = [float(rate) for rate in rates if rate is not None and not isinstance(rate, Tensor)]
        if numbers or not tensors:
            tensors.append(like.new_full((), max(numbers, default=1.0)))
        largest.append(tensors[0] if len(tensors) == 1 else torch.stack(tensors).amax())
    return torch.stack(largest)


def remember_rates(groups: list[Group], held: list[Group] | None = None) -> None:
    """Store the learning rate of the step that was made: by the time it is read, a scheduler has set the next one.

    ``held`` is what the groups held when the step began, if somebody may have written to them since.
    """
    for group, begun in zip(groups, held or groups, strict=True):
        if (lr := begun.get("lr")) is not None:
            group[LAST_LR] = lr.clone() if isinstance(lr, Tensor) else lr


def last_rate(group: Group) -> float:
    """The learning rate of the last step as a share of its peak; 1 for a base that has none."""
    lr = group.get(LAST_LR, group.get("lr"))
    return 1.0 if lr is None else float(lr) / float(group[PEAK_LR])


def largest(groups: list[Group], key: str, default: float) -> float:
    """The largest ``lr``, or what a scheduler keeps in the groups: ``initial_lr``, or ``max_lr`` of ``OneCycleLR``."""
    return max((float(group[key]) for group in groups if group.get(key) is not None), default=default)


def peak_lr_of(groups: list[Group]) -> float:
    """The learning rate that the groups were built with. This is the peak of a schedule, not its present value."""
    peaks = [group.get("max_lr", group.get("initial_lr", group.get("lr"))) for group in groups]
    sizes = [float(peak) for peak in peaks if peak is not None]
    if not all(math.isfinite(size) for size in sizes):
        raise ValueError(f"a learning rate must be a finite number, got {sizes}; build the base with e.g. lr=1.0")
    if sizes and not max(sizes) > 0:
        raise ValueError(
            f"every learning rate is 0 or less, got {sizes}, so there is no step to scale; "
            "build the base with any positive lr, e.g. lr=1.0"
        )
    return max(sizes, default=1.0)


def rebase(groups: list[Group], peak_lr: float) -> None:
    """Let another learning rate count as 1 for groups that share a tuner: those of a script that has resumed."""
    for group in groups:
        for name in _IN_UNITS_OF_LR:
            group[TUNER][_ROW_OF[name]] *= peak_lr / group[PEAK_LR]
        group[PEAK_LR] = peak_lr


def hand_over(groups: list[Group]) -> None:
    """Multiply the learning rates by the frozen S, and remove everything of Mechanic's from the groups."""
    for group in groups:
        factor = group[FROZEN] / group[PEAK_LR]
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):
            if group.get(key) is not None:
                group[key] = group[key] * factor
        if isinstance(group.get("d"), Tensor):  # that of Adafactor is a number
            del group["d"]
        for key in [key for key in group if key.startswith("mechanic_")]:
            del group[key]
