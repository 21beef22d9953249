"""Work on whole lists of tensors, for devices where every call of an operator costs something: all but the CPU.

A list operator of torch takes some hundreds of tensors in one launch, if they agree in shapes, memory order and dtype.
Where there is none, as for inner products, short tensors are packed: copied into one flat tensor. Long ones are worked
on where they are, since for them the copy costs more than the launches. Nothing here reads a value on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mechanic.torch.kernels.rounding import RESIDUAL_DTYPE, tuner_dtype, working_dtype
from mechanic.torch.private import (
    foreach_add_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_sub_,
)

LONG = 1 << 21
"""Tensors of so many elements are not packed for a sum: copying them would take longer than the launches it saves."""

LONGEST_PACK = 1 << 24
"""Elements that are packed, or go into one inner product, at a time. A pack in float32 takes 64 MB for a while, and a
longer inner product in float32 would lose digits."""

ALIGNED = 64
"""Elements. Tensors in a pack that outlives the call begin at multiples of these, as kernels for vectors want it."""

TAKES_ZERO_DIM_FACTORS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)
"""Whether ``addcmul`` on lists takes 0-dim tensors for its first factor without falling back to one launch per tensor
(pull request 172731 of PyTorch)."""


def five_sums(
    params: list[Tensor], grads: list[Tensor], deltas: list[Tensor], sign: float, device: torch.device
) -> Tensor:
    """See :func:`mechanic.torch.kernels.eager.measure`."""
    lists = {name: _real(tensors) for name, tensors in (("g", grads), ("x", params), ("d", deltas)) if tensors}
    dtype = working_dtype(lists["x"][0].dtype) if lists else torch.float32
    long, short = _long_and_short(list(lists.values()), dtype)
    parts = []
    none = torch.zeros((), dtype=dtype, device=device)
    for pieces in long:  # their squared norms are taken together, below
        row = dict(zip(lists, pieces, strict=True))
        parts += [_dot(row, "dg", none), _dot(row, "dx", none), none, none, none]
    for tensors in _in_packs(short):
        columns = dict(zip(lists, tensors, strict=True))
        row = {name: _packed(column, columns["x"], dtype) for name, column in columns.items()}
        parts += [_dot(row, pair, none) for pair in ("dg", "dx", "gg", "xx", "dd")]
    if not parts:
        return torch.zeros(5, dtype=tuner_dtype(device), device=device)
    total = torch.stack(parts).reshape(-1, 5).sum(0, dtype=tuner_dtype(device))
    if long:
        first = 2 if grads else 3  # of the columns |g|^2, |x|^2, |Delta|^2
        norms = _squared_norms([list(tensors) for tensors in zip(*long, strict=True)], device)
        total[first : first + len(lists)].add_(norms)
    if sign != 1:
        total[0].mul_(sign)
    return _as_if_summed_in(dtype, total)


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The sum of all |t|^2, 0-dim."""
    tensors = _real(tensors)
    if not tensors:
        return torch.zeros((), dtype=tuner_dtype(device), device=device)
    return _as_if_summed_in(working_dtype(tensors[0].dtype), _squared_norms([tensors], device).squeeze(0))


def _dot(tensors: dict[str, Tensor], pair: str, none: Tensor) -> Tensor:
    a, b = (tensors.get(name) for name in pair)
    return none if a is None or b is None else torch.dot(a, b)


def _squared_norms(lists: list[list[Tensor]], device: torch.device) -> Tensor:
    """Of lists of equal length, each summed up, [lists]."""
    norms = foreach_norm([tensor for tensors in lists for tensor in tensors], dtype=tuner_dtype(device))
    return torch.stack(norms).square_().view(len(lists), -1).sum(1)


def _as_if_summed_in(dtype: torch.dtype, total: Tensor) -> Tensor:
    """What leaves the range of the gradients' own dtype counts as infinite: a base that squares it would overflow."""
    return total.to(dtype).to(total.dtype)


def _real(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]


def _long_and_short(
    lists: list[list[Tensor]], dtype: torch.dtype
) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]:
    """Rows of flat pieces that can be worked on where they are, and rows of tensors that have to be packed."""
    long: list[tuple[Tensor, ...]] = []
    short: list[tuple[Tensor, ...]] = []
    for row in zip(*lists, strict=True):
        if not (elements := row[0].numel()):
            continue
        views = flat_views(row) if elements >= LONG else None
        if views is None:
            short.append(row)
        else:
            in_place = all(view.dtype == dtype for view in views)
            pieces = zip(*(torch.split(view, LONGEST_PACK) for view in views), strict=True)
            (long if in_place else short).extend(pieces)
    return long, short


def _in_packs(rows: Sequence[tuple[Tensor, ...]]) -> Iterator[list[list[Tensor]]]:
    """Rows of tensors of equal shapes, as lists of about one pack each."""
    waiting: list[tuple[Tensor, ...]] = []
    size = 0
    for row in rows:
        elements = row[0].numel()
        if waiting and size + elements > LONGEST_PACK:
            yield [list(column) for column in zip(*waiting, strict=True)]
            waiting, size = [], 0
        waiting.append(row)
        size += elements
    if waiting:
        yield [list(column) for column in zip(*waiting, strict=True)]


def _packed(tensors: list[Tensor], like: list[Tensor], dtype: torch.dtype) -> Tensor:
    """One flat tensor with copies of all, in the memory order of others of their shapes."""
    flat, views = _empty_pack(like, dtype, alignment=1)
    foreach_copy_(views, tensors)
    return flat


def _empty_pack(like: list[Tensor], dtype: torch.dtype, alignment: int = ALIGNED) -> tuple[Tensor, list[Tensor]]:
    """A flat tensor, and views of it with the shapes and the memory order of others."""
    offsets, size = [], 0
    for tensor in like:
        offsets.append(size)
        size += -(-tensor.numel() // alignment) * alignment
    flat = torch.empty(size, dtype=dtype, device=like[0].device)
    return flat, [_view_like(flat, t, offset) for t, offset in zip(like, offsets, strict=True)]


def _view_like(flat: Tensor, tensor: Tensor, offset: int) -> Tensor:
    strides = tensor.stride() if flat_views([tensor]) else torch.empty(tensor.shape, device="meta").stride()
    return flat.as_strided(tensor.shape, strides, offset)


def flat_views(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Flat views of tensors of one shape with the same order of elements; None if their memory has none."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        order = sorted(range(tensors[0].ndim), key=tensors[0].stride, reverse=True)
        tensors = [tensor.permute(order) for tensor in tensors]
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
    return [tensor.view(-1) for tensor in tensors]


def clear_unless(flag: Tensor, tensors: list[Tensor]) -> None:
    """Zero tensors that are viewed as integers if the flag, 0-dim, is False: an integer times 0 or 1 is exact."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, integers in by_dtype.items():
        foreach_mul_(integers, flag.to(dtype))


def add_scaled(values: list[Tensor], directions: list[Tensor], factor: Tensor | float) -> None:
    """x <- x + factor d."""
    if not isinstance(factor, Tensor):
        foreach_add_(values, directions, alpha=factor)
        return
    if TAKES_ZERO_DIM_FACTORS:
        foreach_addcmul_(values, [factor] * len(values), directions)
        return
    rows = list(zip(values, directions, strict=True))
    if long := [row for row in rows if row[0].numel() >= LONG]:
        x, d = (list(column) for column in zip(*long, strict=True))
        foreach_addcmul_(x, [factor] * len(x), d)  # one launch each
    for x, d in _in_packs([row for row in rows if row[0].numel() < LONG]):
        foreach_add_(x, foreach_mul(d, factor))


def copies_of(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies: list[Tensor] = []
    for (originals,) in _in_packs([(tensor,) for tensor in tensors]):
        views = _empty_pack(originals, dtype)[1]
        foreach_copy_(views, originals)
        copies += views
    return copies


def values_of(params: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
    """See :func:`mechanic.torch.kernels.rounding.values_of`."""
    values: list[Tensor] = []
    for stored, rest in _in_packs(list(zip(params, residuals, strict=True))):
        total, views = _empty_pack(stored, torch.float32)
        foreach_copy_(views, rest)
        wide = _wide(stored, stored)[0]
        total.add_(wide)
        torch.where(total.to(stored[0].dtype) == wide, total, wide, out=total)
        values += views
    return values


def store_rounded(values: list[Tensor], params: list[Tensor], residuals: list[Tensor]) -> None:
    """See :func:`mechanic.torch.kernels.rounding.store_rounded`."""
    for exact, stored, rest in _in_packs(list(zip(values, params, residuals, strict=True))):
        foreach_copy_(stored, exact)
        wide, wide_views = _wide(stored, stored)
        foreach_sub_(exact, wide_views)
        foreach_copy_(rest, exact)
        wide_rest, rest_views = _wide(rest, stored)
        again = torch.add(wide_rest, wide, out=torch.empty_like(wide, dtype=stored[0].dtype))
        smaller = wide_rest * (1 - torch.finfo(RESIDUAL_DTYPE).eps)
        torch.where(again != wide, smaller, wide_rest, out=wide_rest)
        foreach_copy_(rest, rest_views)


def _wide(tensors: list[Tensor], like: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A pack of copies in float32, flat and as views."""
    flat, views = _empty_pack(like, torch.float32)
    foreach_copy_(views, tensors)
    return flat, views
