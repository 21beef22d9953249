"""Param groups: which tuner each belongs to, and what Mechanic keeps in it.

Every group holds a copy of its tuner's row, so that no checkpoint route can part groups that share one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mechanic.torch.checkpoint import DELTA, FORMAT, GROUP_KEYS, OPTIONAL_GROUP_KEYS
from mechanic.torch.vectors import tuner_dtype
from mechanic.tuner import TunerConfig, TunerState

Group = dict[str, Any]

# Rows of a group's tuner, after the betas.
_SCALES = 1 + TunerState._fields.index("scales")
_STEPS = 1 + TunerState._fields.index("steps")
_NONFINITE_STEPS = 1 + TunerState._fields.index("nonfinite_steps")


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
    layer_of = {p: name.rpartition(".")[0] for name, p in module.named_parameters()}
    split: list[Group] = []
    for group in [{"params": module.parameters()}] if groups is None else groups:
        if "tuner" in group:
            split.append(group)
            continue
        params = list(group["params"])
        if any(p not in layer_of for p in params):
            raise ValueError("a group has parameters that are not the module's; give them a 'tuner' of their own")
        split += [
            {**group, "params": [p for p in params if layer_of[p] == layer], "tuner": layer}
            for layer in dict.fromkeys(layer_of[p] for p in params)
        ]
    return split


def params_of(groups: Iterable[Group]) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in groups)


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


def is_entered(group: Group) -> bool:
    """Whether Mechanic keeps its entries in the group."""
    return "mechanic_format" in group


def enter(
    groups: list[Group],
    config: TunerConfig,
    unit: float | None,
    base_name: str,
    *,
    per_group: bool,
    former_rows: Iterable[int] = (),
) -> None:
    """Give new groups their tuner: that of the groups they share one with, or a fresh one.

    Everything is checked before the first group is changed. ``former_rows`` are those of tuners that may be gone, but
    that something is still remembered of: a new tuner gets none of them.
    """
    if len(params := list(params_of(groups))) != len({id(p) for p in params}):
        raise ValueError("a parameter is in the optimizer more than once, and would be scaled more than once")
    entered = [group for group in groups if is_entered(group)]
    of_all = {key: entered[0][key] for key in ("mechanic_skipped",) if entered and key in entered[0]}
    next_row = 1 + max((*(group["mechanic_row"] for group in entered), *former_rows), default=-1)
    additions: list[tuple[Group, Group]] = []
    for name, sharing in by_tuner(groups, per_group=per_group).items():
        new = [group for group in sharing if not is_entered(group)]
        known = next((group for group in sharing if is_entered(group)), None)
        if not new:
            continue
        if known is not None:
            shared = {key: known[key] for key in ("mechanic_row", "mechanic_unit", "mechanic_frozen") if key in known}
        elif any("mechanic_frozen" in group for group in entered):
            raise ValueError(f"the scales are frozen, and tuner {name!r} has none yet; name one of the others")
        else:
            shared = {"mechanic_row": next_row, "mechanic_unit": unit or unit_of(sharing)}
            next_row += 1
        for group in new:
            tuner = known["mechanic_tuner"].clone() if known else _fresh_tuner(group, groups, config)
            own = {"mechanic_format": FORMAT, "mechanic_base": base_name, "mechanic_tuner": tuner}
            additions.append((group, own | shared | of_all))
    for group, entries in additions:
        group.update(entries)


def leave(groups: list[Group]) -> None:
    """Take out all that Mechanic keeps in the groups."""
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


def unit_of(groups: list[Group]) -> float:
    """The learning rate the groups were built with: the peak of a schedule, not where it stands now."""
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
    return group["mechanic_tuner"].unbind()[_SCALES].sum()  # type: ignore[no-any-return]


def step_counts(groups: list[Group]) -> tuple[int, int]:
    """How many steps had feedback, and how many had gradients that were not finite; of the tuner with most of each.

    Reads from the device.
    """
    tuners = torch.stack([group["mechanic_tuner"].cpu() for group in groups])
    return int(tuners[:, _STEPS].max()), int(tuners[:, _NONFINITE_STEPS].max())


def remember_rates(groups: list[Group]) -> None:
    """Keep the learning rate of the step that was made: schedulers have written the next one when it is asked for."""
    for group in groups:
        lr, former = group.get("lr"), group.get("mechanic_lr")
        if isinstance(lr, Tensor) and isinstance(former, Tensor):
            former.copy_(lr)  # in place, as CUDA graphs need it
        elif lr is not None:
            group["mechanic_lr"] = lr.clone() if isinstance(lr, Tensor) else lr


def rows_of(groups: list[Group]) -> dict[int, int]:
    """Where in :func:`read_tuners` a tuner is: ZeRO hands groups over one at a time."""
    return {row: index for index, row in enumerate(sorted({group["mechanic_row"] for group in groups}))}


def read_tuners(groups: list[Group], device: torch.device | None) -> Tensor:
    """[tuners, 10, n]: the betas, then the fields of TunerState; on ``device``, or where they are."""
    device = device or groups[0]["mechanic_tuner"].device
    rows, dtype = {}, tuner_dtype(device)
    for group in groups:
        tuner = group["mechanic_tuner"]
        if tuner.device != device or tuner.dtype != dtype:  # the model was moved, or comes from elsewhere
            group["mechanic_tuner"] = tuner.to(device, dtype)
        rows[group["mechanic_row"]] = group["mechanic_tuner"]
    return torch.stack([rows[row] for row in sorted(rows)])


def read_rates(groups: list[Group], like: Tensor) -> Tensor:
    """Of every tuner the learning rate now, [tuners]: the largest among its groups."""
    index = rows_of(groups)
    rates: list[list[Any]] = [[] for _ in index]
    for group in groups:
        rates[index[group["mechanic_row"]]].append(group.get("lr"))
    return torch.stack([_largest(known, like) for known in rates])


def _largest(rates: list[Any], like: Tensor) -> Tensor:
    """Of numbers and tensors, 0-dim; without a wait for the device."""
    tensors = [rate.to(like) for rate in rates if isinstance(rate, Tensor)]
    numbers = [float(rate) for rate in rates if rate is not None and not isinstance(rate, Tensor)]
    if numbers or not tensors:
        tensors.append(like.new_full((), max(numbers, default=1.0)))
    return torch.stack(tensors).amax()


def write_tuners(groups: list[Group], tuners: Tensor) -> None:
    """In place, as CUDA graphs need it."""
    index, rows = rows_of(groups), tuners.unbind()
    torch._foreach_copy_([g["mechanic_tuner"] for g in groups], [rows[index[g["mechanic_row"]]] for g in groups])


def show_scales(groups: list[Group]) -> None:
    """Keep ``d`` = S / unit in every group, so that the ``d * lr`` which trainers log is the rate really applied."""
    rates = [scale_of(group) / group["mechanic_unit"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        if not isinstance(group.get("d"), Tensor) or group["d"].device != rate.device:
            group["d"] = rate.clone()
    torch._foreach_copy_([group["d"] for group in groups], rates)


class Presence:
    """Remembers which parameters every tuner stepped with."""

    def __init__(self) -> None:
        self._groups: tuple[tuple[int, int], ...] = ()  # identity and size of the groups that stepped last
        self._params: dict[int, set[Tensor]] = {}  # of every tuner, when it last stepped

    def rows(self) -> list[int]:
        """Of all tuners that have stepped, whether they are still there or not."""
        return list(self._params)

    def check(self, groups: list[Group], state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """One S scales all that a tuner has moved, so it cannot step with a part of it gone."""
        stepping = tuple((id(group), len(group["params"])) for group in groups)
        if stepping == self._groups:
            return
        present: dict[int, set[Tensor]] = {}
        for group in groups:
            present.setdefault(group["mechanic_row"], set()).update(group["params"])
        in_some_group = set(params_of(groups))
        for row, params in present.items():
            if any(DELTA in state.get(p, ()) for p in self._params.get(row, params) - in_some_group):
                raise RuntimeError(
                    "parameters that Mechanic has moved are in no param group now. DeepSpeed's ZeRO steps its "
                    "optimizer group by group, and a tuner needs all its gradients in one step: put all parameters "
                    "into one param group, tune the groups apart, Mechanic(base, per_group=True), or use fully_shard. "
                    "Where they were taken out for good, delete their optimizer.state"
                )
        self._groups = stepping
        self._params.update(present)
