"""The work that grows with the model, on lists of tensors: the five sums, and the move to the next Delta.

Lists are of equal length and shapes. S, S' and all other factors are 0-dim tensors on the device of the lists, so a
step never waits for the device. On a CPU the work is done in pieces that stay in the cache of a core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic.torch.delta import RESIDUAL_DTYPE, Noise, Stored, encode, values_in, working_dtype
from mechanic.torch.private import (
    flatten,
    foreach_add_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    foreach_sub_,
)

ON_CPU = 1 << 17
"""Elements that a CPU works on at a time. A multiple of :data:`mechanic.torch.delta.ROW`."""

LONG = 1 << 22
"""On other devices tensors of so many elements are not joined for a sum: the copy takes longer than the launches."""

LONGEST = 1 << 24
"""Elements of one inner product on other devices. A longer one loses digits in float32."""

LONGEST_ON_CPU = 1 << 20
"""The same on a CPU, for tensors that cannot be cut because their orders in memory differ."""

ALIGNED = 64
"""Copies of small tensors begin at multiples of so many elements, as kernels for vectors want it."""

Lists = tuple[list[Tensor], ...]


class Factors(NamedTuple):
    """How a step scales what the base does: [tuners] each, or 0-dim for one tuner."""

    to_own: Tensor  # 1 - S: the base's own iterates are at x_1 + Delta, the parameters at x_1 + S Delta
    of_update: Tensor  # S / k
    of_delta: Tensor  # S' - S / k
    retention: Tensor | None = None  # k, the share of Delta that is kept; None means k = 1


class Scaling:
    """The factors of one step for all tuners."""

    def __init__(self, before: Tensor, after: Tensor, retention: Tensor | None = None) -> None:
        ratio = before if retention is None else before / retention
        self._factors = Factors(1 - before, ratio, after - ratio, retention)
        self._made: dict[Any, Factors] = {}

    def of(self, row: int, like: torch.dtype, device: torch.device) -> Factors:
        """Those of one tuner, in the working dtype of parameters."""
        if (found := self._made.get((row, like, device))) is None:
            dtype = working_dtype(like).to_real()
            found = Factors(*(t if t is None else t.unbind()[row].to(device, dtype) for t in self._factors))  # type: ignore[arg-type]
            self._made[row, like, device] = found
        return found


class Scratch:
    """Memory for the copies of one part, used again for those of the next: new memory costs as much as the work."""

    def __init__(self) -> None:
        self._kept: dict[Any, Tensor] = {}
        self._used: dict[Any, int] = {}

    def begin(self) -> None:
        """The copies of the former part are not needed any more."""
        self._used.clear()

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor that holds anything."""
        first = self._used.get((dtype, device), 0)
        kept = self._kept.get((dtype, device))
        if kept is None or len(kept) < first + size:
            kept = self._kept[dtype, device] = torch.empty(first + size, dtype=dtype, device=device)
        self._used[dtype, device] = first + size
        return kept.narrow(0, first, size)


class Start(NamedTuple):
    """Where the base stands before its step, and what it leaves out."""

    at: str  # "x", "own" for x_1 + Delta, "zero" if its update depends on the gradient alone
    dtype: torch.dtype
    decay: float = 0.0  # lr times weight decay, which a base that stands at zero does not apply


def five_sums(
    params: list[Tensor], grads: list[Tensor], deltas: list[Stored], sign: float, dtype: torch.dtype
) -> Tensor:
    """The sums of :data:`mechanic.tuner.SUMS` over parameters on one device, [5], added up in a dtype.

    ``grads`` and ``deltas`` are empty if no parameter has one; they then count as zero. ``sign`` is -1 if the base
    ascends.
    """
    parts: list[Tensor] = []
    squares: list[list[Tensor]] = []  # of long tensors, where there is a list operator for norms
    none = torch.zeros((), device=params[0].device)
    codes, coded = [delta.codes for delta in deltas], _are_coded(deltas, params)
    for index, first, (x, g, d) in _pieces(params, grads, codes, alone=coded):
        if coded:
            d = [values_in(deltas[index].part(d[0], first), working_dtype(x[0].dtype))]
        takes_norms = len(x) == 1 and not _on_cpu(x) and x[0].dtype == working_dtype(x[0].dtype) and bool(g and d)
        for xs, gs, ds in _rows(x, g, d):
            parts += [
                none if gs is None or ds is None else torch.dot(ds, gs),
                none if ds is None else torch.dot(ds, xs),
            ]
            if takes_norms and gs is not None and ds is not None:
                parts += [none, none, none]
                squares.append([gs, xs, ds])
            else:
                parts += [none if t is None else torch.dot(t, t) for t in (gs, xs, ds)]
    if not parts:
        return torch.zeros(5, dtype=dtype, device=none.device)
    total = torch.stack(parts).to(dtype).reshape(-1, 5).sum(0)
    if squares:
        norms = foreach_norm([t for row in squares for t in row], dtype=dtype)
        total.narrow(0, 2, 3).add_(torch.stack(norms).square_().view(-1, 3).sum(0))
    if sign != 1:
        total.narrow(0, 0, 1).mul_(sign)
    return total


def squared_norm(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of all |t|^2, [1]."""
    return five_sums(tensors, [], [], 1.0, dtype).narrow(0, 3, 1)


def move(
    params: list[Tensor],
    residuals: list[Tensor],
    deltas: list[Stored],
    stepped: list[Tensor],
    start: Start,
    scaling: Factors,
    noise: Noise | None,
) -> None:
    """From x_1 + S Delta to x_1 + S' Delta', where Delta' = k Delta + u and u is what the base did.

    ``stepped`` is what the base left where it started from, and is overwritten; it is empty if the base did not step.
    x' = x + S/k u + (S' - S/k) Delta' needs no x_1, and keeps what others did to the parameters between steps. A
    parameter is written once, with its final value. ``deltas`` are empty if S is frozen: x' = x + S u.
    """
    k = scaling.retention
    coded = _are_coded(deltas, params)
    lists = params, residuals, stepped, [delta.codes for delta in deltas]
    for index, first, (x, residual, u, d) in _parts(*lists, alone=coded):
        stored = deltas[index].part(d[0], first) if coded else None
        values = values_of(x, residual) if residual else x
        if stored is not None:
            d = [values_in(stored, values[0].dtype)]
        if u:
            if u[0].dtype != values[0].dtype:
                u = [tensor.to(values[0].dtype) for tensor in u]
            if start.at == "own" and d:
                add_scaled(u, d, -scaling.to_own)
            if start.at != "zero":
                foreach_sub_(u, values)
            elif start.decay:
                foreach_add_(u, values, alpha=-start.decay)
        if d and k is not None:
            foreach_mul_(d, k)
        if d and u:
            foreach_add_(d, u)
        _write(x, residual, values, u, d, scaling)
        if stored is None:
            continue
        if not u and stored.scales is not None and k is not None:
            stored.scales.mul_(k)  # which multiplies all elements of a block, without rounding
        elif u or k is not None:
            encode(d[0], stored, noise)


def _write(
    params: list[Tensor], residuals: list[Tensor], values: list[Tensor], u: list[Tensor], d: list[Tensor], by: Factors
) -> None:
    """Add u and Delta', each times its factor, to the values of parameters, and write the parameters once."""
    if residuals:
        if u:
            add_scaled(values, u, by.of_update)
        if d:
            add_scaled(values, d, by.of_delta)
        store_rounded(values, params, residuals)
    elif u and d:
        foreach_mul_(u, by.of_update)
        add_scaled(u, d, by.of_delta)
        foreach_add_(params, u)
    elif u or d:
        add_scaled(params, u or d, by.of_update if u else by.of_delta)


def add_scaled(values: list[Tensor], directions: list[Tensor], factor: Tensor) -> None:
    """x <- x + factor d."""
    foreach_addcmul_(values, [factor] * len(values), directions)


# Gradients that are not finite.


def clear_unless(flag: Tensor, tensors: list[Tensor]) -> None:
    """Zero all tensors in place if the flag, 0-dim, is False. As integers, since infinity times zero is not zero."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        integers = real.view(_INTEGERS[real.itemsize])
        by_dtype.setdefault(integers.dtype, []).append(integers)
    for dtype, alike in by_dtype.items():
        foreach_mul_(alike, flag.to(dtype))


def can_be_cleared(tensor: Tensor) -> bool:
    """Whether :func:`clear_unless` can write to it: no expanded tensor, lazy negation or lazy conjugate."""
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not (is_expanded or tensor.is_neg() or tensor.is_conj())


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


# Half precision.


def values_of(params: list[Tensor], residuals: list[Tensor], scratch: Scratch | None = None) -> list[Tensor]:
    """The values that half-precision parameters stand for, in float32: what is stored plus what rounding cut off."""
    flat, values = _packed(residuals, params, scratch)
    wide, _ = _packed(params, params)
    flat.add_(wide)
    # If the sum rounds to something else, somebody has written to the parameter since. Then p is the value.
    if is_on_host(flat) and all(torch.equal(v.to(p.dtype), p) for v, p in zip(values, params, strict=True)):
        return values
    torch.where(flat.to(params[0].dtype) == wide, flat, wide, out=flat)
    return values


def store_rounded(values: list[Tensor], params: list[Tensor], residuals: list[Tensor]) -> None:
    """Round float32 values into half-precision parameters and keep what that cuts off. ``values`` is overwritten."""
    foreach_copy_(params, values)
    wide, wide_views = _packed(params, params)
    foreach_sub_(values, wide_views)
    foreach_copy_(residuals, values)
    # A residual rounded up to half of the parameter's last bit would look like somebody's write.
    rest, rest_views = _packed(residuals, params)
    again = torch.add(rest, wide).to(params[0].dtype)
    smaller = rest * (1 - torch.finfo(RESIDUAL_DTYPE).eps)
    torch.where(again != wide, smaller, rest, out=rest)
    foreach_copy_(residuals, rest_views)


# Packs and pieces.


def views_like(like: list[Tensor], dtype: torch.dtype, scratch: Scratch | None = None) -> tuple[Tensor, list[Tensor]]:
    """A flat tensor that holds anything, and views of it with the shapes and the memory order of others."""
    offsets, size = [], 0
    for tensor in like:
        offsets.append(size)
        size += -(-tensor.numel() // ALIGNED) * ALIGNED
    flat = (scratch or Scratch()).take(size, dtype, like[0].device)
    return flat, [_view_like(flat, t, offset) for t, offset in zip(like, offsets, strict=True)]


def zeros_like(like: list[Tensor], dtype: torch.dtype, scratch: Scratch) -> list[Tensor]:
    flat, zeros = views_like(like, dtype, scratch)
    flat.zero_()
    return zeros


def copies_of(tensors: list[Tensor], scratch: Scratch) -> list[Tensor]:
    copies = views_like(tensors, tensors[0].dtype, scratch)[1]
    foreach_copy_(copies, tensors)
    return copies


def _packed(tensors: list[Tensor], like: list[Tensor], scratch: Scratch | None = None) -> tuple[Tensor, list[Tensor]]:
    """Copies in float32, flat and as views. The gaps between them hold anything."""
    flat, views = views_like(like, torch.float32, scratch)
    foreach_copy_(views, tensors)
    return flat, views


def _view_like(flat: Tensor, tensor: Tensor, offset: int) -> Tensor:
    strides = tensor.stride() if flat_views([tensor]) else torch.empty(tensor.shape, device="meta").stride()
    return flat.as_strided(tensor.shape, strides, flat.storage_offset() + offset)


def is_on_host(tensor: Tensor) -> bool:
    """Whether its values can be read without waiting for a device."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def _on_cpu(tensors: Sequence[Tensor]) -> bool:
    return tensors[0].device.type == "cpu"


def _are_coded(deltas: list[Stored], params: list[Tensor]) -> bool:
    """Whether Deltas have to be decoded."""
    return bool(deltas) and deltas[0].codes.dtype != working_dtype(params[0].dtype)


def _parts(*lists: list[Tensor], alone: bool) -> Iterator[tuple[int, int, Lists]]:
    """What :func:`move` works on at a time: pieces on a CPU, elsewhere the lists as they are."""
    if lists[0] and (alone or _on_cpu(lists[0])):
        yield from _pieces(*lists, alone=alone)
    elif lists[0]:
        yield 0, 0, lists


def _pieces(*lists: list[Tensor], alone: bool) -> Iterator[tuple[int, int, Lists]]:
    """Cut lists of equal shapes at the same places; lists may be empty. With the index and the first element of each.

    Long tensors are cut into views. Short ones are taken together, unless each is to stay ``alone``, since for them a
    call costs more than the work.
    """
    long, longest = (ON_CPU, ON_CPU) if _on_cpu(lists[0]) else (LONG, LONGEST)
    waiting: list[int] = []
    size = 0
    for index, tensor in enumerate(lists[0]):
        elements = tensor.numel()
        if elements < long and not alone:
            if size + elements > longest and not _on_cpu(lists[0]):
                yield 0, 0, _chosen(lists, waiting)
                waiting, size = [], 0
            waiting.append(index)
            size += elements
            if size >= longest:
                yield 0, 0, _chosen(lists, waiting)
                waiting, size = [], 0
        elif elements:
            tensors = [tensors[index] for tensors in lists if tensors]
            views = flat_views(tensors)
            cut = [(t,) for t in tensors] if views is None else [torch.split(view, longest) for view in views]
            places = [position for position, tensors in enumerate(lists) if tensors]
            for number, row in enumerate(zip(*cut, strict=True)):
                piece: list[list[Tensor]] = [[] for _ in lists]
                for position, tensor in zip(places, row, strict=True):
                    piece[position] = [tensor]
                yield index, number * longest, tuple(piece)
    if waiting:
        yield 0, 0, _chosen(lists, waiting)


def _chosen(lists: Lists, indices: list[int]) -> Lists:
    return tuple([tensors[index] for index in indices] if tensors else [] for tensors in lists)


def flat_views(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Flat views of tensors of one shape with the same order of elements; None if their memory has none."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        order = sorted(range(tensors[0].ndim), key=tensors[0].stride, reverse=True)
        tensors = [tensor.permute(order) for tensor in tensors]
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
    return [tensor.view(-1) for tensor in tensors]


def _rows(*lists: list[Tensor]) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Lists as flat real tensors in at least float32, in pieces for one inner product. An empty list gives None."""
    flat = [_join(tensors) if tensors else None for tensors in lists]
    present = [row for row in flat if row is not None]
    longest = LONGEST_ON_CPU if _on_cpu(present) else LONGEST
    if len(present[0]) <= longest:
        yield tuple(flat)  # type: ignore[misc]
        return
    cut = [[None] if row is None else torch.split(row, longest) for row in flat]
    count = -(-len(present[0]) // longest)
    for index in range(count):
        yield tuple(None if row[0] is None else row[index] for row in cut)  # type: ignore[misc]


def _join(tensors: list[Tensor]) -> Tensor:
    joined = tensors[0].reshape(-1) if len(tensors) == 1 else flatten(tensors)
    joined = torch.view_as_real(joined.resolve_conj()).reshape(-1) if joined.is_complex() else joined
    return joined.to(working_dtype(joined.dtype))
