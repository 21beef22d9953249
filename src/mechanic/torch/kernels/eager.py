"""The kernels in plain PyTorch: the reference for every other set.

Lists are of equal length and shapes, and are changed in place. S, S' and all other factors are 0-dim tensors on the
device of the lists. Nothing here reads a value on the host, so a step never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from mechanic.torch.kernels import rounding, whole
from mechanic.torch.kernels.rounding import tuner_dtype, working_dtype
from mechanic.torch.kernels.whole import flat_views
from mechanic.torch.private import (
    flatten,
    foreach_add_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_mul_,
    foreach_sub_,
)

PIECE = {"cpu": 1 << 17}
"""Elements that are worked on at a time, by type of device. Pieces of this size stay in the cache of a core, so the
five sums read memory once. On other devices lists are worked on as a whole, see :mod:`mechanic.torch.kernels.whole`."""

LONGEST_PIECE = 1 << 20
"""One long fp32 dot product loses digits (5e-4 at 1e8 elements); a sum of shorter ones does not."""


def takes_pieces(device: torch.device) -> bool:
    return device.type in PIECE


def measure(
    params: list[Tensor], grads: list[Tensor], deltas: list[Tensor], sign: float, device: torch.device
) -> Tensor:
    """The five sums of :data:`mechanic.tuner.SUMS` over parameters on one device, [5].

    ``grads`` and ``deltas`` are empty if no parameter has one; they then count as zero. ``sign`` is -1 if the base
    ascends.
    """
    if not takes_pieces(device):
        return whole.five_sums(params, grads, deltas, sign, device)
    none = torch.zeros((), device=device)
    parts = []
    for x, g, d in _joined(params, grads or None, deltas or None):
        parts += [
            none if g is None or d is None else torch.dot(d, g),
            none if d is None else torch.dot(d, x),
            none if g is None else torch.dot(g, g),
            torch.dot(x, x),
            none if d is None else torch.dot(d, d),
        ]
    delta_grad, *others = total(parts, 5, device).unbind()
    return torch.stack([sign * delta_grad, *others])


def dot(a: list[Tensor], b: list[Tensor], device: torch.device) -> Tensor:
    """The sum of Re<a_i, b_i> over two lists of equal shapes, as a 0-dim tensor in the tuner's dtype."""
    return total([torch.dot(x, y) for x, y in _joined(a, b)], 1, device).squeeze(0)


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The sum of all |t|^2, as a 0-dim tensor in the tuner's dtype."""
    return dot(tensors, tensors, device) if takes_pieces(device) else whole.squared_norm(tensors, device)


def total(parts: list[Tensor], width: int, device: torch.device) -> Tensor:
    """The sums of ``width`` columns, [width], of parts that are listed row by row."""
    dtype = tuner_dtype(device)
    if not parts:
        return torch.zeros(width, dtype=dtype, device=device)
    return torch.stack(parts).to(dtype).reshape(-1, width).sum(0)


def _joined(*lists: list[Tensor] | None) -> Iterator[tuple[Any, ...]]:
    """Several lists of equal shapes as flat real pieces in at least float32. A list that is None gives Nones."""
    for batch in _batches(*lists):
        joined = tuple(None if tensors is None else _join(tensors) for tensors in batch)
        if max(len(flat) for flat in joined if flat is not None) <= 2 * LONGEST_PIECE:
            yield joined
        else:  # memory layouts that could not be split at the same elements
            pieces = [repeat(None) if flat is None else torch.split(flat, LONGEST_PIECE) for flat in joined]
            yield from zip(*pieces, strict=False)


def _join(tensors: list[Tensor]) -> Tensor:
    joined = tensors[0].reshape(-1) if len(tensors) == 1 else flatten(tensors)
    joined = torch.view_as_real(joined.resolve_conj()).reshape(-1) if joined.is_complex() else joined
    return joined.to(working_dtype(joined.dtype))


def _batches(*lists: list[Tensor] | None) -> Iterator[tuple[Any, ...]]:
    """Cut several lists of equal shapes at the same places, into lists that hold about one piece in all.

    Long tensors are cut into views. Short ones are taken together, since for them a call costs more than the work.
    """
    present = [tensors for tensors in lists if tensors is not None]
    if present[0] and not takes_pieces(present[0][0].device):
        yield lists
        return
    waiting: list[int] = []
    size = 0
    length = PIECE[present[0][0].device.type] if present[0] else 0

    def chosen(indices: list[int]) -> tuple[Any, ...]:
        return tuple(None if tensors is None else [tensors[i] for i in indices] for tensors in lists)

    for index, tensor in enumerate(present[0]):
        if (elements := tensor.numel()) < length:
            waiting.append(index)
            size += elements
            if size >= length:
                yield chosen(waiting)
                waiting, size = [], 0
            continue
        pieces = iter(_split_alike([tensors[index] for tensors in present], length))
        split = [None if tensors is None else next(pieces) for tensors in lists]
        count = next(len(parts) for parts in split if parts is not None)
        for part in range(count):
            yield tuple(None if parts is None else [parts[part]] for parts in split)
    if waiting:
        yield chosen(waiting)


def _split_alike(tensors: list[Tensor], length: int) -> list[tuple[Tensor, ...]]:
    """Views of tensors of one shape, split at the same elements: flat if their memory allows it, else whole."""
    views = flat_views(tensors)
    return [(tensor,) for tensor in tensors] if views is None else [torch.split(view, length) for view in views]


def is_on_host(tensor: Tensor) -> bool:
    """Whether its values can be read without waiting for a device."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def clear_unless(flag: Tensor, tensors: list[Tensor]) -> None:
    """Zero all tensors in place if the flag, 0-dim, is False. By their bits: infinity times zero is not zero."""
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    integers = [tensor.view(_INTEGERS[tensor.itemsize]) for tensor in real]
    if not takes_pieces(flag.device):
        whole.clear_unless(flag, integers)
        return
    masks = {dtype: -flag.to(dtype) for dtype in {tensor.dtype for tensor in integers}}  # all bits, or none
    for tensor in integers:
        tensor.bitwise_and_(masks[tensor.dtype])


def can_be_cleared(tensor: Tensor) -> bool:
    """Whether :func:`clear_unless` can write to it. It cannot write to expanded tensors, or to lazy negations and
    conjugates."""
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not (is_expanded or tensor.is_neg() or tensor.is_conj())


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def combine(
    values: list[Tensor],
    stepped: list[Tensor],
    deltas: list[Tensor],
    scale: Tensor,
    change: Tensor,
    retention: Tensor | None = None,
) -> None:
    """Scale what the base did to copies of the parameters.

    On entry ``values`` hold x and ``stepped`` x + u. On return ``deltas`` hold Delta' = k Delta + u and ``values``
    x' = x + S u + (S' - S) Delta', where k is the ``retention`` and S' - S the ``change``. With the former S divided by
    k this is x + S' Delta' - S Delta. It never needs x_1, and it keeps what others did to the parameters between steps.
    ``stepped`` is overwritten.
    """
    for x, u, d in _batches(values, stepped, deltas):
        foreach_sub_(u, x)
        if retention is not None:
            foreach_mul_(d, retention)
        foreach_add_(d, u)
        add_scaled(x, u, scale)
        add_scaled(x, d, change)


def prepare_delta(
    values: list[Tensor], deltas: list[Tensor], scale: Tensor, decay: float, retention: Tensor | None = None
) -> None:
    """x <- x - S Delta; Delta <- k Delta - decay x. The base may now step on Delta in place of x."""
    of_delta = _factor_of_delta(scale, decay, retention)
    of_value = _number_like(scale, -decay)
    back = -scale
    for x, d in _batches(values, deltas):
        add_scaled(x, d, back)
        if decay or retention is not None:
            foreach_mul_(d, of_delta)
        if decay:
            add_scaled(d, x, of_value)


def restore_delta(
    values: list[Tensor], deltas: list[Tensor], scale: Tensor, decay: float, retention: Tensor | None = None
) -> None:
    """The inverse of :func:`prepare_delta`, up to rounding."""
    back = 1 / _factor_of_delta(scale, decay, retention)
    of_value = _number_like(scale, decay)
    for x, d in _batches(values, deltas):
        if decay:
            add_scaled(d, x, of_value)
        if decay or retention is not None:
            foreach_mul_(d, back)
        add_scaled(x, d, scale)


def _factor_of_delta(scale: Tensor, decay: float, retention: Tensor | None) -> Tensor:
    """k - decay S: the weight decay is of x, which is (x - S Delta) + S Delta."""
    return (1.0 if retention is None else retention) - decay * scale


def _number_like(tensor: Tensor, number: float) -> Tensor | float:
    """What :func:`add_scaled` takes for a number: a 0-dim tensor for pieces, itself for whole lists."""
    return torch.full_like(tensor, number) if takes_pieces(tensor.device) else number


def add_scaled(values: list[Tensor], directions: list[Tensor], factor: Tensor | float) -> None:
    """x <- x + factor d."""
    if not isinstance(factor, Tensor) or (values and not takes_pieces(values[0].device)):
        whole.add_scaled(values, directions, factor)
    else:
        foreach_addcmul_(values, directions, [factor] * len(values))


def add_scaled_step(values: list[Tensor], stepped: list[Tensor], scale: Tensor | None) -> None:
    """x <- x + S u, where ``stepped`` holds x + u and is overwritten. None is S = 1."""
    if scale is None:
        foreach_copy_(values, stepped)
        return
    for x, u in _batches(values, stepped):
        foreach_sub_(u, x)
        add_scaled(x, u, scale)


def copies_of(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if tensors and not takes_pieces(tensors[0].device):
        return whole.copies_of(tensors, dtype)
    return [tensor.to(dtype, copy=True) for tensor in tensors]


def values_of(params: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
    values_of = rounding.values_of if takes_pieces(params[0].device) else whole.values_of
    return values_of(params, residuals)


def store_rounded(values: list[Tensor], params: list[Tensor], residuals: list[Tensor]) -> None:
    store_rounded = rounding.store_rounded if takes_pieces(params[0].device) else whole.store_rounded
    store_rounded(values, params, residuals)
