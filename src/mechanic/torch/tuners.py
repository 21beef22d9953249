"""Which param group belongs to which tuner, and reading and writing the tuners.

Every group holds a copy of its tuner, so that no checkpoint route can separate groups that share one.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mechanic.config import TunerConfig
from mechanic.torch.layout import (
    FORMAT,
    FROZEN,
    GROUP_KEYS,
    LAST_LR,
    OPTIONAL_GROUP_KEYS,
    PEAK_LR,
    ROW,
    SKIPPED,
    TUNER,
    Group,
    params_of,
    rows_of,
)
from mechanic.torch.private import foreach_copy_
from mechanic.tuner import TunerState

_SCALES = 1 + TunerState._fields.index("scales")  # the row of a group's tuner, after the betas


def tuner_dtype(device: torch.device) -> torch.dtype:
    """float64 if the device has it: 1 - 0.999999 leaves one digit of a float32."""
    return torch.float64 if _has_float64(device) else torch.float32


@functools.cache
def _has_float64(device: torch.device) -> bool:
    if device.type == "xpu":  # Intel's data-centre GPUs have it, Arc does not
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def tuner_names(groups: list[Group], *, per_group: bool) -> list[str]:
    """The name of every group's tuner."""
    named = {str(group["tuner"]) for group in groups if group.get("tuner") is not None}
    names = []
    for index, group in enumerate(groups):
        if group.get("tuner") is not None:
            names.append(str(group["tuner"]))
        elif per_group and (name := f"group {index}") in named:
            raise ValueError(
                f"a group names the tuner {name!r}, which is what per_group=True calls that of group {index}"
            )
        else:
            names.append(f"group {index}" if per_group else "default")
    return names


def by_tuner(groups: list[Group], *, per_group: bool) -> dict[str, list[Group]]:
    """The groups that share a tuner, by its name."""
    sharing: dict[str, list[Group]] = {}
    for name, group in zip(tuner_names(groups, per_group=per_group), groups, strict=True):
        sharing.setdefault(name, []).append(group)
    return sharing


def is_assigned(group: Group) -> bool:
    """Whether the group has a tuner."""
    return "mechanic_format" in group


def assign_tuners(
    groups: list[Group],
    config: TunerConfig,
    peak_lr: float | None,
    base_names: list[str],
    *,
    per_group: bool,
    former_rows: Iterable[int] = (),
) -> None:
    """Give new groups their tuner: that of the groups they share one with, or a new one.

    Everything is checked before the first group is changed. ``base_names`` are by group. ``former_rows`` are rows of
    tuners that may be gone but are still remembered somewhere. A new tuner gets none of these.
    """
    if len(params := list(params_of(groups))) != len({id(p) for p in params}):
        raise ValueError("a parameter is in the optimizer more than once, and would be scaled more than once")
    assigned = [group for group in groups if is_assigned(group)]
    skipped = assigned[0].get(SKIPPED, 0) if assigned else 0
    next_row = 1 + max((*(group[ROW] for group in assigned), *former_rows), default=-1)
    additions: list[tuple[Group, Group]] = []
    name_of = {id(group): name for group, name in zip(groups, base_names, strict=True)}
    for name, sharing in by_tuner(groups, per_group=per_group).items():
        new = [group for group in sharing if not is_assigned(group)]
        known = next((group for group in sharing if is_assigned(group)), None)
        if not new:
            continue
        if known is not None:
            shared = {key: known[key] for key in (ROW, PEAK_LR, FROZEN) if key in known}
        elif any(FROZEN in group for group in assigned):
            raise ValueError(f"the scales are frozen, and tuner {name!r} has none yet; name one of the others")
        else:
            shared = {ROW: next_row, PEAK_LR: peak_lr or peak_lr_of(sharing)}
            next_row += 1
        for group in new:
            tuner = known[TUNER].clone() if known else _fresh_tuner(group, groups, config)
            own = {"mechanic_format": FORMAT, "mechanic_base": name_of[id(group)], TUNER: tuner, SKIPPED: skipped}
            additions.append((group, own | shared))
    for group, entries in additions:
        group.update(entries)
    remember_rates([group for group, _ in additions])  # torch loads into the keys that a new optimizer has


def remove_tuners(groups: list[Group]) -> None:
    """Remove all that Mechanic keeps in the groups."""
    for group in groups:
        for key in (*GROUP_KEYS, *OPTIONAL_GROUP_KEYS):
            if key != "d" or isinstance(group.get("d"), Tensor):  # Adafactor has a d of its own, a number
                group.pop(key, None)


def _fresh_tuner(group: Group, groups: list[Group], config: TunerConfig) -> Tensor:
    first = next(params_of([group, *groups]), None)
    # On the meta device the betas would be lost; read_tuners moves the tuner to where the parameters are.
    device = torch.device("cpu") if first is None or first.is_meta else first.device
    unused = [[0.0] * len(config.betas)] * len(TunerState._fields)
    return torch.tensor([config.betas, *unused], dtype=tuner_dtype(device), device=device)


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


def scale_of(group: Group) -> Tensor:
    """S, 0-dim."""
    return group[TUNER].unbind()[_SCALES].sum()  # type: ignore[no-any-return]


def step_counts(groups: list[Group]) -> tuple[int, int]:
    """How many steps had feedback, and how many had NaN or infinite gradients; the largest count of any tuner.

    Reads from the device.
    """
    tuner = read_on_host(groups)
    return int(tuner.steps.max()), int(tuner.nonfinite_steps.max())


def read_on_host(groups: list[Group]) -> TunerState:
    """The state of every group's tuner, each [groups, n]. Waits for the device."""
    return TunerState(*torch.stack([group[TUNER].cpu() for group in groups]).unbind(1)[1:])


def largest_lr(groups: list[Group]) -> float:
    """The largest of the present learning rates; 1 for bases that have none."""
    return max(float(group["lr"]) if group.get("lr") is not None else 1.0 for group in groups)


def one_cycle_peak(groups: list[Group]) -> float:
    """What a ``OneCycleLR`` keeps in the groups as its peak; 0 if there is none."""
    return max((float(group["max_lr"]) for group in groups if "max_lr" in group), default=0.0)


def rebase(groups: list[Group], peak_lr: float) -> None:
    """Let another learning rate count as 1 for groups that share a tuner: those of a script that has resumed."""
    row = 1 + TunerState._fields.index("largest_rate")
    for group in groups:
        group[TUNER][row] *= peak_lr / group[PEAK_LR]
        group[PEAK_LR] = peak_lr


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


def read_tuners(groups: list[Group], device: torch.device | None) -> tuple[Tensor, TunerState]:
    """The betas and the state of all tuners, each [tuners, n]; on ``device``, or where they are."""
    device = device or groups[0][TUNER].device  # the model may have been moved, or the checkpoint be from elsewhere
    for group in groups:
        group[TUNER] = group[TUNER].to(device, tuner_dtype(device))
    rows = {group[ROW]: group[TUNER] for group in groups}
    betas, *fields = torch.stack([rows[row] for row in sorted(rows)]).unbind(1)
    return betas, TunerState(*fields)


def read_rates(groups: list[Group], like: Tensor) -> Tensor:
    """The present learning rate of every tuner, [tuners]: the largest among its groups."""
    index = rows_of(groups)
    rates: list[list[Any]] = [[] for _ in index]
    for group in groups:
        rates[index[group[ROW]]].append(group.get("lr"))
    return torch.stack([_largest(known, like) for known in rates])


def _largest(rates: list[Any], like: Tensor) -> Tensor:
    """The largest of numbers and tensors, 0-dim, without waiting for the device."""
    tensors = [rate.to(like) for rate in rates if isinstance(rate, Tensor)]
    numbers = [float(rate) for rate in rates if rate is not None and not isinstance(rate, Tensor)]
    if numbers or not tensors:
        tensors.append(like.new_full((), max(numbers, default=1.0)))
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors).amax()


def write_tuners(groups: list[Group], betas: Tensor, state: TunerState) -> None:
    """In one operation, so that groups that share a tuner never differ in it."""
    index, rows = rows_of(groups), torch.stack([betas, *state], 1).unbind()
    foreach_copy_([g[TUNER] for g in groups], [rows[index[g[ROW]]] for g in groups])


def show_scales(groups: list[Group]) -> None:
    """Keep ``d`` = S / peak_lr in every group: many trainers log ``d * lr``, which is then the effective rate."""
    for group in groups:
        group["d"] = scale_of(group) / group[PEAK_LR]


def warn_user(message: str) -> None:
    """Warn, with the line of the first caller outside of Mechanic and PyTorch."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("mechanic", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
