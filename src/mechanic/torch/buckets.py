"""Parameters that can be worked on as one list, with what Mechanic keeps of them: Delta, and what rounding cut off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mechanic.torch.delta import (
    RESIDUAL_DTYPE,
    Noise,
    Stored,
    blocks_in,
    decode,
    dtype_of_delta,
    encode,
    is_half_precision,
    values_in,
    working_dtype,
)
from mechanic.torch.layout import DELTA, DELTA_SCALES, RESIDUAL, ROW, Group, rows_of
from mechanic.torch.lists import (
    INTEGERS,
    Factors,
    Start,
    add_scaled,
    cleared_unless,
    five_sums,
    move,
    packed,
    values_of,
)
from mechanic.torch.shards import Reduction, cut_grad_as_parameter, is_dtensor, like, local, shard_number

if TYPE_CHECKING:
    from typing_extensions import Self

SHARD = 20
"""Where the number of a shard begins in a parameter's number for rounding."""

PART = {"cpu": 1 << 20}
PART_ELSEWHERE = 1 << 25
"""Elements that the base steps on at a time, by kind of device, if it steps every parameter by itself."""


class Scaling:
    """What one step does with all tuners.

    Args:
        before: S, [tuners], that the parameters have now.
        after: S', [tuners], that they will have.
        counts: [tuners], the number of the step, which Deltas in fewer bits are rounded by.
        retention: k, [tuners]; None means k = 1.
        finite: [tuners], whether the gradients were finite. Without it the base gets them as they are.
    """

    def __init__(
        self,
        before: Tensor,
        after: Tensor,
        counts: Tensor,
        retention: Tensor | None = None,
        finite: Tensor | None = None,
    ) -> None:
        ratio = before if retention is None else before / retention
        numbers = [1 - before, ratio, after - ratio]
        self._numbers = torch.stack(numbers if retention is None else [*numbers, retention])
        self._finite, self._counts = finite, counts
        self._factors: dict[Any, Factors] = {}

    def of(self, bucket: Bucket) -> Factors:
        """The factors of the tuner of a bucket."""
        key = bucket.row, bucket.dtype, bucket.device
        if key not in self._factors:
            wide = working_dtype(bucket.dtype).to_real()
            numbers = self._numbers.to(bucket.device, wide).unbind(1)[bucket.row].unbind()
            finite = None if self._finite is None else self._finite.unbind()[bucket.row]
            if finite is not None:
                finite = finite.to(bucket.device, INTEGERS[bucket.dtype.to_real().itemsize])
            noise = Noise(self._counts.unbind()[bucket.row], bucket.device)
            self._factors[key] = Factors(finite, noise, *numbers)
        return self._factors[key]


@dataclass
class Bucket:
    """Trainable parameters that can be worked on as one list."""

    row: int  # of the tuner
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
        sums = five_sums(self._locals(), self._grads(), self._deltas(), self.start.sign, dtype)
        return sums if self.weight == 1 else sums * self.weight

    def grad_sq(self, dtype: torch.dtype) -> Tensor:
        """|g|^2, [1], of what this rank holds; not weighted, as it only tells whether the gradients are finite."""
        if not self.has_grad:
            return torch.zeros(1, dtype=dtype, device=self.device)
        return five_sums(self._grads(), [], [], 1.0, dtype).narrow(0, 3, 1)  # of "parameters"

    def copies(self, factors: Factors) -> list[Tensor]:
        """Temporary tensors for the base to step on, one for each parameter."""
        params, residuals = self._locals(), self._residuals()
        if self.start.at == "zero":
            return packed(None, params, self.start.dtype)[1]
        copies = values_of(params, residuals) if residuals else packed(params, params, self.dtype)[1]
        if self.start.at == "own":
            deltas = [values_in(delta, self.start.dtype) for delta in self._deltas()]
            add_scaled(copies, deltas, factors.to_own)
        return copies

    def seen(self, copies: list[Tensor], factors: Factors) -> dict[Tensor, Tensor]:
        """What the base sees in place of the parameters: the copies, with the gradients and with their attributes."""
        seen = {p: like(p, copy).requires_grad_() for p, copy in zip(self.params, copies, strict=False)}
        for p, tensor in seen.items():
            if not self.sharded:
                vars(tensor).update(vars(p))
        if self.has_grad:  # train() and eval() need none
            grads = self._grads() if factors.finite is None else cleared_unless(factors.finite, self._grads())
            for (p, tensor), grad in zip(seen.items(), grads, strict=False):
                tensor.grad = like(p, grad.to(tensor.dtype))
        return seen

    def move(self, state: Any, stepped: list[Tensor], factors: Factors) -> None:
        """Go to the next Delta. ``stepped`` is what the base left in the copies, or empty; ``state`` is the base's."""
        if self.moves:
            for p, kept in zip(self.params, self.states, strict=True):
                state[p].update(kept)
            move(self._locals(), self._residuals(), self._deltas(), stepped, self.start, factors)

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
    groups: list[Group],
    state: Any,
    start_of: Callable[[int, torch.dtype], Start],
    reduction: Reduction,
    delta: torch.dtype | str | None,
    is_frozen: bool,
    chosen: Collection[Tensor] | None = None,
) -> list[Bucket]:
    """The trainable parameters, or those of them that are ``chosen``, and what Mechanic keeps of them.

    Args:
        groups: the param groups.
        state: the base's.
        start_of: where the base starts from, by the index of the group and the dtype of the parameter.
        reduction: what a parameter counts in the sum over ranks.
        delta: what Delta is kept in, as a user says it.
        is_frozen: whether S is, and no Delta is kept.
        chosen: some of the parameters.
    """
    buckets: dict[tuple[Any, ...], Bucket] = {}
    rows = rows_of(groups)
    number = -1  # of the parameter among those that are trained
    for index, group in enumerate(groups):
        for p in group["params"]:
            if not p.requires_grad:
                continue
            number += 1
            if chosen is not None and p not in chosen:
                continue
            grad, entry = p.grad, state.get(p, {})
            _check(p, grad, entry)
            if sharded := is_dtensor(p):
                cut_grad_as_parameter(p)
            # A parameter that never had a gradient has no state. It has not moved, and will not move now.
            has_grad, moves = grad is not None, grad is not None or DELTA in entry
            start = start_of(index, p.dtype)
            key = (rows[group[ROW]], reduction.weight(p), p.device, p.dtype, sharded, has_grad, moves, start)
            if (bucket := buckets.get(key)) is None:
                bucket = buckets[key] = Bucket(*key)
            bucket.params.append(p)
            bucket.states.append(kept_of(p, entry, delta, is_frozen=is_frozen) if moves else {})
            bucket.numbers.append(number + (shard_number(p) << SHARD if sharded else 0))
    return list(buckets.values())


def parts_of(buckets: list[Bucket], *, one_by_one: bool) -> list[list[Bucket]]:
    """Buckets that the base steps on one after the other, so that few copies are there at a time."""
    if not one_by_one:
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


def kept_of(
    p: Tensor, entry: dict[str, Tensor], delta: torch.dtype | str | None, *, is_frozen: bool
) -> dict[str, Tensor]:
    """What Mechanic keeps of a parameter, from its state or new: Delta, unless S is frozen, and a residual.

    A Delta in another dtype is rounded to nearest.
    """
    kept = {} if is_frozen else _delta_of(p, entry, dtype_of_delta(p.dtype, delta))
    if is_half_precision(p.dtype):
        residual = entry.get(RESIDUAL)
        kept[RESIDUAL] = torch.zeros_like(p, dtype=RESIDUAL_DTYPE) if residual is None else residual.to(RESIDUAL_DTYPE)
    return kept


def _delta_of(p: Tensor, entry: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    found = entry.get(DELTA)
    if dtype != torch.int8:
        return {DELTA: torch.zeros_like(p, dtype=dtype) if found is None else found.to(dtype)}
    if found is not None and DELTA_SCALES in entry:
        return {key: entry[key] for key in (DELTA, DELTA_SCALES)}
    codes = torch.zeros_like(p, dtype=dtype)
    scales = torch.zeros(blocks_in(local(codes).numel()), dtype=torch.float32, device=codes.device)
    if found is not None:
        encode(local(found), Stored(local(codes), scales))
    return {DELTA: codes, DELTA_SCALES: scales}


def decoded(entry: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter as a checkpoint has it: with Delta in float32 in place of codes and scales."""
    if DELTA_SCALES not in entry:
        return entry
    delta = torch.empty_like(entry[DELTA], dtype=torch.float32)
    local(delta).copy_(decode(Stored(local(entry[DELTA]), entry[DELTA_SCALES])))
    return {**{key: value for key, value in entry.items() if key != DELTA_SCALES}, DELTA: delta}


def _check(p: Tensor, grad: Tensor | None, entry: dict[str, Tensor]) -> None:
    if grad is not None and grad.layout != torch.strided:
        raise ValueError(
            f"Mechanic needs dense gradients, got one of layout {grad.layout}; build the embedding with sparse=False"
        )
    if DELTA in entry and entry[DELTA].shape != p.shape:
        remedy = (
            "load a checkpoint that was resized, since int8 codes cannot be"
            if DELTA_SCALES in entry
            else "where parameters are resized in mid-training, resize all tensors of optimizer.state[p] with them, "
            "with zeros for new elements of 'mechanic_delta'"
        )
        raise ValueError(
            f"a parameter has shape {tuple(p.shape)} now, and its state 'mechanic_delta' still "
            f"{tuple(entry[DELTA].shape)}; {remedy}"
        )
