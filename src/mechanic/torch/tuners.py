"""Which param group belongs to which tuner, and reading and writing the tuners.

Every group holds a copy of its tuner, so that no checkpoint route can separate groups that share one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mechanic.config import TunerConfig
from mechanic.torch.kernels.rounding import tuner_dtype
from mechanic.torch.layout import (
    DELTA,
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
)
from mechanic.torch.private import foreach_copy_
from mechanic.tuner import TunerState

_SCALES = 1 + TunerState._fields.index("scales")  # the row of a group's tuner, after the betas


def layer_groups(module: torch.nn.Module, groups: Iterable[Group] | None = None) -> list[Group]:
    """Param groups that give every layer of a module a tuner of its own.

    A layer is a submodule that holds parameters directly, so a weight and its bias stay together.

    Args:
        module: whose layers to tell apart.
        groups: your own groups, if you have any, with their options; each is split by layer, and parts of one
            layer in several groups (decay and no decay) share its tuner. A group that names a ``"tuner"`` is kept.

    Example:
        >>> import torch
        >>> from mechanic.torch import Mechanic, layer_groups
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = Mechanic(torch.optim.AdamW(layer_groups(model), lr=1.0))
        >>> optimizer.scales()
        {'0': 0.0, '2': 0.0}
    """
    layer_of: dict[Tensor, str] = {p: name.rpartition(".")[0] for name, p in module.named_parameters()}
    split: list[Group] = []
    for group in [{"params": module.parameters()}] if groups is None else groups:
        if "tuner" in group:
            split.append(group)
            continue
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        params = [p[1] if isinstance(p, tuple) else p for p in params]  # with their names, as torch takes them
        if any(p not in layer_of for p in params):
            raise ValueError("a group has parameters that are not the module's; give them a 'tuner' of their own")
        split += [
            {**group, "params": [p for p in params if layer_of[p] == layer], "tuner": layer}
            for layer in dict.fromkeys(layer_of[p] for p in params)
        ]
    return split


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


def remember_rates(groups: list[Group]) -> None:
    """Store the learning rate of the step that was made: by the time it is read, a scheduler has set the next one."""
    for group in groups:
        lr, former = group.get("lr"), group.get(LAST_LR)
        if isinstance(lr, Tensor) and isinstance(former, Tensor):
            former.copy_(lr)  # in place, as CUDA graphs need it
        elif lr is not None:
            group[LAST_LR] = lr.clone() if isinstance(lr, Tensor) else lr


def last_rate(group: Group) -> float:
    """The learning rate of the last step as a share of its peak; 1 for a base that has none."""
    lr = group.get(LAST_LR, group.get("lr"))
    return 1.0 if lr is None else float(lr) / float(group[PEAK_LR])


def rows_of(groups: list[Group]) -> dict[int, int]:
    """The index of each row in :func:`read_tuners`. ZeRO steps one group at a time, so rows can be missing."""
    return {row: index for index, row in enumerate(sorted({group[ROW] for group in groups}))}


def read_tuners(groups: list[Group], device: torch.device | None) -> tuple[Tensor, TunerState]:
    """The betas and the state of all tuners, each [tuners, n]; on ``device``, or where they are."""
    bring(groups, device or groups[0][TUNER].device)
    rows = {group[ROW]: group[TUNER] for group in groups}
    betas, *fields = torch.stack([rows[row] for row in sorted(rows)]).unbind(1)
    return betas, TunerState(*fields)


def bring(groups: list[Group], device: torch.device) -> None:
    """Have all tuners on ``device``: the model may have been moved, or the checkpoint be from elsewhere."""
    dtype = tuner_dtype(device)
    for group in groups:
        tuner = group[TUNER]
        if tuner.device != device or tuner.dtype != dtype:
            group[TUNER] = tuner.to(device, dtype)


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
    """In place, as CUDA graphs need it."""
    index, rows = rows_of(groups), torch.stack([betas, *state], 1).unbind()
    foreach_copy_([g[TUNER] for g in groups], [rows[index[g[ROW]]] for g in groups])


def show_scales(groups: list[Group]) -> None:
    """Keep ``d`` = S / peak_lr in every group: many trainers log ``d * lr``, which is then the effective rate."""
    rates = [scale_of(group) / group[PEAK_LR] for group in groups]
    make_shown(groups)
    foreach_copy_([group["d"] for group in groups], rates)


def make_shown(groups: list[Group]) -> None:
    """Have a tensor ``d`` beside every tuner."""
    for group in groups:
        tuner, shown = group[TUNER], group.get("d")
        if not isinstance(shown, Tensor) or shown.device != tuner.device or shown.dtype != tuner.dtype:
            group["d"] = tuner.new_zeros(())


class MissingParameterCheck:
    """Remembers which parameters every tuner stepped with, and raises if some of them are gone at the next step."""

    def __init__(self) -> None:
        self._groups: tuple[tuple[int, int], ...] = ()  # identity and size of the groups that stepped last
        self._params: dict[int, set[Tensor]] = {}  # of every tuner, when it last stepped

    def rows(self) -> list[int]:
        """The rows of all tuners that have stepped, whether they are still there or not."""
        return list(self._params)

    def check(self, groups: list[Group], state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """One S scales all parameters that a tuner has moved, so it cannot step without some of them."""
        stepping = tuple((id(group), len(group["params"])) for group in groups)
        if stepping == self._groups:
            return
        present: dict[int, set[Tensor]] = {}
        for group in groups:
            present.setdefault(group[ROW], set()).update(group["params"])
        in_some_group = set(params_of(groups))
        for row, params in present.items():
            if any(DELTA in state.get(p, ()) for p in self._params.get(row, params) - in_some_group):
                raise RuntimeError(
                    "parameters that Mechanic has moved are in no param group now. DeepSpeed's ZeRO steps its "
                    "optimizer group by group, and a tuner needs all its gradients in one step: put all parameters "
                    "into one param group, tune the groups apart, Mechanic(base, per_group=True), or use fully_shard. "
                    "If they were removed for good, delete their optimizer.state"
                )
        self._groups = stepping
        self._params.update(present)
