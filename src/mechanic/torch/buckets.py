"""Parameters that can be worked on as one list: of one tuner, device and dtype, with or without a gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.base import ascends, see, starts_of, steps_one_by_one
from mechanic.torch.delta import Noises, Stored, dtype_of_delta, mechanic_state, values_in, working_dtype
from mechanic.torch.layout import DELTA, DELTA_SCALES, RESIDUAL, ROW, Group
from mechanic.torch.lists import (
    Scaling,
    Scratch,
    Start,
    add_scaled,
    can_be_cleared,
    clear_unless,
    copies_of,
    five_sums,
    is_on_host,
    move,
    squared_norm,
    values_of,
    zeros_like,
)
from mechanic.torch.shards import Reduction, cut_grad_as_parameter, dtensor_class, local, shard_number
from mechanic.torch.together import owners_of
from mechanic.torch.tuners import rows_of

if TYPE_CHECKING:
    from typing_extensions import Self

SHARD = 20
"""Where the number of a shard begins in a parameter's number for rounding."""

PART = {"cpu": 1 << 20}
PART_ELSEWHERE = 1 << 25
"""Elements that the base steps on at a time, by kind of device, if it steps every parameter by itself."""


@dataclass(frozen=True)
class Options:
    """What Mechanic was told of the parameters."""

    delta: torch.dtype | str | None
    own_iterates: bool
    frozen: bool = False


@dataclass
class Bucket:
    """Trainable parameters that can be worked on as one list."""

    row: int  # of the tuner
    sign: float  # -1 if the base ascends
    weight: float  # of what this rank holds in the sum over ranks
    device: torch.device
    dtype: torch.dtype
    sharded: bool  # DTensors
    has_grad: bool
    moves: bool  # it has a gradient, or a Delta from earlier ones
    start: Start  # of the base
    params: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)  # what Mechanic keeps of them; empty if none moves
    numbers: list[int] = field(default_factory=list)  # of the parameters, for rounding

    def sums(self, dtype: torch.dtype) -> Tensor:
        """The five sums, [5], of what this rank holds."""
        sums = five_sums(self._locals(), self._grads(), self._deltas(), self.sign, dtype)
        return sums if self.weight == 1 else sums * self.weight

    def grad_sq(self, dtype: torch.dtype) -> Tensor:
        """|g|^2, [1], of what this rank holds; not weighted, as it only tells whether the gradients are finite."""
        return squared_norm(self._grads(), dtype) if self.has_grad else torch.zeros(1, dtype=dtype, device=self.device)

    def discard_grads_unless(self, finite: Tensor) -> None:
        """Zero the gradients if the flag of their tuner is False, [tuners]: the base must not see them."""
        flag = finite.unbind()[self.row].to(self.device)
        if is_on_host(flag) and flag:
            return
        for p in () if self.sharded else self.params:
            if p.grad is not None and not can_be_cleared(p.grad):
                p.grad = p.grad.clone().resolve_neg().resolve_conj().contiguous()
        clear_unless(flag, self._grads())

    def copies(self, scaling: Scaling, scratch: Scratch) -> list[Tensor]:
        """Temporary tensors for the base to step on, one for each parameter."""
        params, residuals = self._locals(), self._residuals()
        if self.start.at == "zero":
            return zeros_like(params, self.start.dtype, scratch)
        copies = values_of(params, residuals, scratch) if residuals else copies_of(params, scratch)
        if self.start.at == "own":
            deltas = [values_in(delta, self.start.dtype) for delta in self._deltas()]
            add_scaled(copies, deltas, scaling.of(self.row, self.dtype, self.device).to_own)
        return copies

    def see(self, copies: list[Tensor]) -> dict[Tensor, Tensor]:
        """What the base sees in place of the parameters; nothing if there are no copies."""
        return {p: see(p, copy) for p, copy in zip(self.params, copies, strict=False)}

    def move(self, state: Any, stepped: list[Tensor], scaling: Scaling, noises: Noises | None) -> None:
        """Go to the next Delta. ``stepped`` is what the base left in the copies, or empty; ``state`` is the base's."""
        if self.moves:
            for p, kept in zip(self.params, self.states, strict=True):
                state[p].update(kept)
            of_tuner = scaling.of(self.row, self.dtype, self.device)
            noise = None if noises is None else noises.of(self.row, self.device)
            move(self._locals(), self._residuals(), self._deltas(), stepped, self.start, of_tuner, noise)

    def split(self, most: int) -> Iterator[Self]:
        """Buckets of at most so many elements, or of one tensor that has more."""
        first = elements = 0
        for index, p in enumerate(self._locals()):
            if index > first and elements + p.numel() > most:
                yield self._part(first, index)
                first, elements = index, 0
            elements += p.numel()
        yield self._part(first, len(self.params))

    def _part(self, first: int, end: int) -> Self:
        lists = {name: getattr(self, name)[first:end] for name in ("params", "states", "numbers")}
        return self if end - first == len(self.params) else replace(self, **lists)

    def _locals(self) -> list[Tensor]:
        return [local(p) for p in self.params] if self.sharded else self.params

    def _grads(self) -> list[Tensor]:
        return [local(p.grad) for p in self.params] if self.has_grad else []

    def _residuals(self) -> list[Tensor]:
        return [local(kept[RESIDUAL]) for kept in self.states if RESIDUAL in kept]

    def _deltas(self) -> list[Stored]:
        kept = zip(self.states, self.numbers, strict=True)
        return [Stored(local(k[DELTA]), k.get(DELTA_SCALES), number) for k, number in kept if DELTA in k]


def buckets_of(
    base: Optimizer,
    reduction: Reduction,
    options: Options,
    params: Collection[Tensor] | None = None,
    held: list[Group] | None = None,
) -> list[Bucket]:
    """The trainable parameters, or some of them, and what Mechanic keeps of them.

    ``held`` is what the groups of the base held when the step began, if somebody may have written to them since.
    """
    buckets: dict[tuple[Any, ...], Bucket] = {}
    rows, dtensor = rows_of(base.param_groups), dtensor_class()
    start_of = starts_of(base, own_iterates=options.own_iterates)
    number = -1  # of the parameter among those that are trained
    for owner, group in zip(owners_of(base), held or base.param_groups, strict=True):
        row, sign = rows[group[ROW]], -1.0 if group.get("maximize", ascends(base)) else 1.0
        starts: dict[torch.dtype, Start] = {}
        for p in group["params"]:
            if not p.requires_grad:
                continue
            number += 1
            if params is not None and p not in params:
                continue
            grad, state = p.grad, base.state.get(p, {})
            _check(p, grad, state)
            if sharded := dtensor is not None and isinstance(p, dtensor):
                cut_grad_as_parameter(p)
            # A parameter that never had a gradient has no state. It has not moved, and will not move now.
            has_grad, moves = grad is not None, grad is not None or DELTA in state
            delta = None if options.frozen else dtype_of_delta(p.dtype, options.delta)
            if p.dtype not in starts:
                starts[p.dtype] = start_of(group, owner, p.dtype, _is_coded(p, options))
            key = (row, sign, reduction.weight(p), p.device, p.dtype, sharded, has_grad, moves, starts[p.dtype])
            if (bucket := buckets.get(key)) is None:
                bucket = buckets[key] = Bucket(*key)
            bucket.params.append(p)
            bucket.states.append(mechanic_state(p, state, delta) if moves else {})
            bucket.numbers.append(number + (shard_number(p) << SHARD if sharded else 0))
    return list(buckets.values())


def seen_dtypes(base: Optimizer, options: Options) -> dict[Tensor, torch.dtype]:
    """The dtypes in which the base sees its parameters, and so makes its state."""
    start_of = starts_of(base, own_iterates=options.own_iterates)
    return {
        p: start_of(group, owner, p.dtype, _is_coded(p, options)).dtype
        for owner, group in zip(owners_of(base), base.param_groups, strict=True)
        for p in group["params"]
    }


def _is_coded(p: Tensor, options: Options) -> bool:
    return dtype_of_delta(p.dtype, options.delta) != working_dtype(p.dtype)


def parts_of(base: Optimizer, buckets: list[Bucket]) -> list[list[Bucket]]:
    """Buckets that the base steps on one after the other, so that few copies are there at a time."""
    if not steps_one_by_one(base):
        return [buckets]
    parts: list[list[Bucket]] = [[]]
    elements = 0
    for bucket in buckets:
        most = PART.get(bucket.device.type, PART_ELSEWHERE)
        for some in bucket.split(most):
            size = sum(p.numel() for p in some.params)
            if parts[-1] and elements + size > most:
                parts.append([])
                elements = 0
            parts[-1].append(some)
            elements += size
    return parts


def _check(p: Tensor, grad: Tensor | None, state: dict[str, Tensor]) -> None:
    if grad is not None and grad.layout != torch.strided:
        raise ValueError(
            f"Mechanic needs dense gradients, got one of layout {grad.layout}; build the embedding with sparse=False"
        )
    if DELTA in state and state[DELTA].shape != p.shape:
        remedy = (
            "in int8, which cannot be resized; load a checkpoint that was resized"
            if DELTA_SCALES in state
            else "where parameters are resized in mid-training, resize all tensors of optimizer.state[p] with them, "
            "with zeros for new elements of 'mechanic_delta'"
        )
        raise ValueError(
            f"a parameter has shape {tuple(p.shape)} now, and its state 'mechanic_delta' still "
            f"{tuple(state[DELTA].shape)}{', ' if DELTA_SCALES in state else '; '}{remedy}"
        )
