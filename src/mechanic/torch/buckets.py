"""Parameters that can be worked on as one list, with what Mechanic keeps of them: Delta, and what rounding cut off."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic.torch.delta import RESIDUAL_DTYPE, Stored, blocks_in, decode, dtype_of_delta, encode
from mechanic.torch.layout import DELTA, DELTA_SCALES, RESIDUAL, is_half_precision
from mechanic.torch.lists import FactorsOf, Start, add_scaled, cleared_unless, five_sums, move, packed, values_of
from mechanic.torch.shards import cut_grad_as_parameter, is_dtensor, like, local, shard_number

SHARD = 20
"""Where the number of a shard begins in a parameter's number for rounding."""

PART = {"cpu": 1 << 20}
PART_ELSEWHERE = 1 << 25
"""Elements that the base steps on at a time, by kind of device, if it steps every parameter by itself."""


class Member(NamedTuple):
    """A parameter in a bucket."""

    p: Tensor
    kept: dict[str, Tensor]  # what Mechanic keeps of it; empty if it does not move
    number: int  # for rounding


@dataclass
class Bucket:
    """Trainable parameters that can be worked on as one list."""

    members: list[Member]
    row: int  # of the tuner
    weight: float  # of what this rank holds in the sum over ranks
    device: torch.device
    dtype: torch.dtype
    has_grad: bool
    moves: bool  # it has a gradient, or a Delta from earlier ones
    start: Start  # of the base

    @property
    def params(self) -> list[Tensor]:
        return [member.p for member in self.members]

    def sums(self, dtype: torch.dtype, *, of_grads: bool) -> Tensor:
        """The five sums, [5], of what this rank holds; or of its gradients alone."""
        params, deltas = ([], []) if of_grads else (self.local_params(), self._deltas())
        sums = five_sums(params, self._grads(), deltas, dtype)
        if self.start.sign != 1:
            sums.narrow(0, 0, 1).mul_(self.start.sign)
        return sums if self.weight == 1 else sums * self.weight

    def lent(self, factors_of: FactorsOf) -> dict[Tensor, Tensor]:
        """Temporary tensors that the base sees in place of the parameters, with their gradients and attributes."""
        factors = factors_of(self.row, self.device, self.dtype)
        params, residuals, grads = self.local_params(), self._residuals(), self._grads()
        if self.start.at == "zero":
            copies = packed(None, params, self.start.dtype)[1]
        else:
            copies = values_of(params, residuals) if residuals else packed(params, params, self.start.dtype)[1]
        if self.start.at == "own":
            add_scaled(copies, [decode(delta, self.start.dtype) for delta in self._deltas()], factors.to_own)
        if grads and factors.finite is not None:
            grads = cleared_unless(factors.finite, grads)
        if any(grad.dtype != self.start.dtype for grad in grads):
            grads = packed(grads, grads, self.start.dtype)[1]
        lent = {}
        for p, copy, grad in zip_longest(self.params, copies, grads):
            tensor = lent[p] = like(p, copy).requires_grad_()
            if not is_dtensor(p):
                vars(tensor).update(vars(p))
            if grad is not None:  # else it is for train() or eval()
                tensor.grad = like(p, grad)
        return lent

    def move(self, state: Any, lent: dict[Tensor, Tensor], factors_of: FactorsOf) -> None:
        """Go to the next Delta, from what the base left in the tensors that it was lent. ``state`` is the base's."""
        if self.moves:
            for p, kept, _ in self.members:
                if RESIDUAL in state[p] and RESIDUAL not in kept:  # p is not in half precision any more
                    state[p] = {key: value for key, value in state[p].items() if key != RESIDUAL}
                state[p].update(kept)
            factors, stepped = factors_of(self.row, self.device, self.dtype), [local(each) for each in lent.values()]
            move(self.local_params(), self._residuals(), self._deltas(), stepped, self.start, factors)

    def local_params(self) -> list[Tensor]:
        """What this rank holds of them."""
        return [local(p) for p in self.params]

    def _grads(self) -> list[Tensor]:
        return [local(p.grad) for p in self.params] if self.has_grad else []

    def _residuals(self) -> list[Tensor]:
        return [local(kept[RESIDUAL]) for _, kept, _ in self.members if RESIDUAL in kept]

    def _deltas(self) -> list[Stored]:
        return [Stored(local(k[DELTA]), k.get(DELTA_SCALES), number) for _, k, number in self.members if DELTA in k]


def parts_of(buckets: list[Bucket], *, one_by_one: bool) -> list[list[Bucket]]:
    """Buckets that the base steps on one after the other, so that few copies are there at a time."""
    parts: list[list[Bucket]] = [[]]
    elements = 0
    for bucket in buckets:
        most = PART.get(bucket.device.type, PART_ELSEWHERE) if one_by_one else float("inf")
        sizes, first = [p.numel() for p in bucket.local_params()], 0
        if parts[-1] and elements + sum(sizes) > most:
            parts.append([])
            elements = 0
        for index, size in enumerate(sizes):
            if elements and elements + size > most:
                parts[-1].append(replace(bucket, members=bucket.members[first:index]))
                parts.append([])
                first, elements = index, 0
            elements += size
        parts[-1].append(replace(bucket, members=bucket.members[first:]))
    return parts


def prepare(p: Tensor, entry: dict[str, Tensor]) -> int:
    """Raise if a parameter cannot be worked on. Returns what its shard adds to its number for rounding."""
    if (grad := p.grad) is not None and grad.layout != torch.strided:
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
    if not is_dtensor(p):
        return 0
    cut_grad_as_parameter(p)
    return shard_number(p) << SHARD


def kept_of(
    p: Tensor, entry: dict[str, Tensor], delta: torch.dtype | str | None, *, is_frozen: bool
) -> dict[str, Tensor]:
    """What Mechanic keeps of a parameter, from its state or new: Delta, unless S is frozen, and a residual.

    A Delta in another dtype is rounded to nearest.
    """

    def cast(key: str, dtype: torch.dtype) -> Tensor:
        return entry[key].to(dtype) if key in entry else torch.zeros_like(p, dtype=dtype)

    kept, dtype = {}, dtype_of_delta(p.dtype, delta)
    if is_half_precision(p.dtype):
        kept[RESIDUAL] = cast(RESIDUAL, RESIDUAL_DTYPE)
    if is_frozen:
        return kept
    if dtype != torch.int8:
        kept[DELTA] = cast(DELTA, dtype)
    elif DELTA_SCALES in entry:
        kept |= {key: entry[key] for key in (DELTA, DELTA_SCALES)}
    else:
        codes = kept[DELTA] = torch.zeros_like(p, dtype=dtype)
        scales = torch.zeros(blocks_in(local(codes).numel()), dtype=torch.float32, device=codes.device)
        kept[DELTA_SCALES] = scales
        if DELTA in entry:
            encode(local(entry[DELTA]), Stored(local(codes), scales))
    return kept


def decoded(entry: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter as a checkpoint has it: with Delta in float32 in place of codes and scales."""
    if DELTA_SCALES not in entry:
        return entry
    delta = like(entry[DELTA], decode(Stored(local(entry[DELTA]), entry[DELTA_SCALES])))
    return {**{key: value for key, value in entry.items() if key != DELTA_SCALES}, DELTA: delta}
