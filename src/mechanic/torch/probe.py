"""What a base does, found out by a few steps on tiny parameters."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.base_step import counting_from, numbers_in, shown_only
from mechanic.torch.bases import is_low_bit
from mechanic.torch.layout import Group
from mechanic.torch.private import global_hooks_silenced
from mechanic.torch.together import owners_of

Shapes = dict[str, tuple[int, ...] | None]
"""Of the entries that a base makes for a parameter: the shape of a tensor, None for anything else."""

_SIZES = (2, 3, 5, 7, 11, 13)  # of the tiny parameter, all different, so that its dimensions can be told apart

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that change how a step is computed, not its result."""


def expected_state(base: Optimizer, saved_groups: list[Group]) -> dict[Tensor, Shapes]:
    """What the base keeps of each parameter, with the options of a checkpoint. Known of torch's own only."""
    expected: dict[Tensor, Shapes] = {}
    for owner, group, saved in zip(owners_of(base), base.param_groups, saved_groups, strict=True):
        if not _is_of_torch(owner):
            continue
        options = {**group, **{key: value for key, value in saved.items() if key in group}}
        by_dims: dict[tuple[int, bool], dict[str, Any]] = {}
        for p in group["params"]:
            kind = p.ndim, p.is_complex()
            if kind not in by_dims:
                by_dims[kind] = _state_after_a_step(type(owner), options, *kind)
            expected[p] = {name: _shape_for(p, value) for name, value in by_dims[kind].items()}
    return expected


def _state_after_a_step(cls: type[Optimizer], options: Group, dims: int, is_complex: bool) -> dict[str, Any]:
    if dims > len(_SIZES):
        return {}
    p = torch.ones(_SIZES[:dims], dtype=torch.complex64 if is_complex else torch.float32)
    try:
        twin = _twin(cls, options, [p], lr=1.0)
        p.grad = torch.ones_like(p)
        _step(twin)
    except Exception:  # options that do not work; other checks name them, or the base itself does
        return {}
    return dict(twin.state[p])


def _shape_for(p: Tensor, value: Any) -> tuple[int, ...] | None:
    """The shape for p of an entry that was made for the tiny parameter."""
    if not isinstance(value, Tensor):
        return None
    sizes = dict(zip(_SIZES, p.shape, strict=False))
    return tuple(sizes.get(size, size) for size in value.shape)


_LINEAR_IN_LR = {
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Muon")
    if hasattr(torch.optim, name)  # Muon is younger than the oldest torch we support
}


def is_linear_in_lr(base: Optimizer) -> bool:
    """Whether the base's update is proportional to lr, so that S can be multiplied into lr.

    Known for torch's own classes and those of few bits, measured for all others.
    """
    return all(
        type(owner) in _LINEAR_IN_LR or is_low_bit(owner)
        if _is_of_torch(owner) or is_low_bit(owner)
        else all(_doubles_with_lr(type(owner), group, lr) for lr in (1e-3, 1.0))
        for owner, group in zip(owners_of(base), base.param_groups, strict=True)
    )


def _is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "torch"


def _doubles_with_lr(cls: type[Optimizer], group: Group, lr: float) -> bool:
    """Whether all steps after the first are twice as long, from the same point, if lr is doubled."""
    start = _start_like(group)
    updates = []
    try:
        for factor in (1.0, 2.0):
            p = start.clone()
            twin = _twin(cls, group, [p], lr)
            for step in range(4):
                p.copy_(start)
                p.grad = torch.cos(3 * start + step)
                _step(twin)
                twin.param_groups[0]["lr"] = factor * lr
                if step > 0:
                    updates.append(p - start)
    except Exception:  # it cannot be built from its options, or needs more than a gradient to step
        return False
    once, twice = torch.stack(updates).chunk(2)
    return bool(once.any()) and torch.allclose(twice, 2 * once, rtol=1e-6, atol=1e-12 * lr)


def steps_one_by_one(base: Optimizer) -> bool:
    """Whether it is the same if a base steps one parameter after the other, each with the group's numbers of before.

    So it is for torch's own classes; measured for all others.
    """
    groups = zip(owners_of(base), base.param_groups, strict=True)
    return all(_is_of_torch(owner) or _is_the_same_one_by_one(owner, group) for owner, group in groups)


def _is_the_same_one_by_one(owner: Optimizer, group: Group) -> bool:
    options = {**vars(owner), **group}  # some are attributes: Lamb's norm of all gradients is
    starts = [_start_like(group), -3 * _start_like(group)]
    found = []
    try:
        for one_by_one in (False, True):
            params = [start.clone() for start in starts]
            twin = _twin(type(owner), options, params, lr=0.1)
            [of_twin] = twin.param_groups
            for step in range(4):
                for p, start in zip(params, starts, strict=True):
                    p.grad = torch.cos(3 * start + step)
                numbers = numbers_in(of_twin)
                for some in [[p] for p in params] if one_by_one else [params]:
                    with shown_only(twin, [(of_twin, some)]), counting_from(of_twin, numbers):
                        _step(twin)
            found.append(torch.stack(params))
    except Exception:  # it cannot be built from its options, or needs more than a gradient to step
        return False
    together, apart = found
    return bool((together != torch.stack(starts)).any()) and torch.allclose(together, apart, rtol=1e-9, atol=0.0)


def _start_like(group: Group) -> Tensor:
    """Values for a tiny parameter with as many dimensions as the group's first has."""
    dims = min(group["params"][0].ndim if group["params"] else 1, len(_SIZES))
    shape = torch.Size(_SIZES[:dims])
    return torch.linspace(1.0, 2.0, shape.numel(), dtype=torch.float64).reshape(shape)


def _twin(cls: type[Optimizer], options: Group, params: list[Tensor], lr: float) -> Optimizer:
    known = inspect.signature(cls).parameters
    chosen = {key: value for key, value in options.items() if key in known and key not in (*_HOW, "params")}
    return cls(params, **{**chosen, "lr": lr})


def _step(optimizer: Optimizer) -> None:
    with global_hooks_silenced(), torch.no_grad():
        optimizer.step()
