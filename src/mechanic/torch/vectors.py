"""The work that grows with the model: inner products and updates over lists of tensors.

Nothing here reads a value on the host, so a step never waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

PIECE = {"cpu": 1 << 17}
"""Elements that are worked on at a time, by kind of device. Pieces of this size stay in the cache of a core, so that
five sums read memory once."""

LONGEST_PIECE = 1 << 20
"""Elsewhere. One long fp32 dot loses digits (5e-4 at 1e8 elements); a sum of shorter ones does not."""

RESIDUAL_DTYPE = torch.bfloat16
"""Two bytes with the range of float32: eight more bits below the last one of a half-precision parameter."""


def tuner_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it: 1 - 0.999999 leaves one digit of a float32."""
    return torch.float64 if _has_float64(device) else torch.float32


@functools.cache
def _has_float64(device: torch.device) -> bool:
    if device.type == "xpu":  # Intel's data-centre GPUs have it, Arc does not
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


@functools.cache
def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32, for Delta and for the values a base steps on: a sum of small steps outgrows half precision."""
    return torch.promote_types(dtype, torch.float32)


def is_half_precision(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16, torch.complex32)


def measure(
    params: list[Tensor], grads: list[Tensor], deltas: list[Tensor], sign: float, device: torch.device
) -> Tensor:
    """The five sums of :data:`mechanic.tuner.SUMS` over parameters on one device, [5].

    ``grads`` and ``deltas`` are those of all parameters, or empty where none has one and they count as zero;
    ``sign`` is -1 where the base ascends.
    """
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
    delta_grad, *others = _total(parts, 5, device).unbind()
    return torch.stack([sign * delta_grad, *others])


def dot(a: list[Tensor], b: list[Tensor], device: torch.device) -> Tensor:
    """The sum of Re<a_i, b_i> over two lists of equal shapes, as a 0-dim tensor in the tuner's dtype."""
    return _total([torch.dot(x, y) for x, y in _joined(a, b)], 1, device).squeeze(0)


def _total(parts: list[Tensor], width: int, device: torch.device) -> Tensor:
    """The sums of so many columns, [width], of parts given row by row."""
    dtype = tuner_dtype(device)
    if not parts:
        return torch.zeros(width, dtype=dtype, device=device)
    return torch.stack(parts).to(dtype).reshape(-1, width).sum(0)


def _joined(*lists: list[Tensor] | None) -> Iterator[tuple[Any, ...]]:
    """Several lists of equal shapes as flat real pieces in at least float32; a list that is None as Nones."""
    for batch in _batches(*lists):
        joined = tuple(None if tensors is None else _join(tensors) for tensors in batch)
        if max(len(flat) for flat in joined if flat is not None) <= 2 * LONGEST_PIECE:
            yield joined
        else:  # layouts that could not be split alike
            pieces = [repeat(None) if flat is None else torch.split(flat, LONGEST_PIECE) for flat in joined]
            yield from zip(*pieces, strict=False)


def _join(tensors: list[Tensor]) -> Tensor:
    joined = tensors[0].reshape(-1) if len(tensors) == 1 else torch._C._nn.flatten_dense_tensors(tensors)
    joined = torch.view_as_real(joined).reshape(-1) if joined.is_complex() else joined
    return joined.to(working_dtype(joined.dtype))


def _batches(*lists: list[Tensor] | None) -> Iterator[tuple[Any, ...]]:
    """Cut several lists of equal shapes at the same places, into lists of about one piece in all.

    Long tensors come as views of their parts, short ones whole and several at a time: for them a call costs more than
    the work.
    """
    present = [tensors for tensors in lists if tensors is not None]
    waiting: list[int] = []
    size = 0
    length = PIECE.get(present[0][0].device.type, LONGEST_PIECE) if present and present[0] else 0

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
    """Views of tensors of one shape, split at the same elements: flat where their memory allows it, else whole."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        order = sorted(range(tensors[0].ndim), key=tensors[0].stride, reverse=True)
        tensors = [tensor.permute(order) for tensor in tensors]
        if not all(tensor.is_contiguous() for tensor in tensors):
            return [(tensor,) for tensor in tensors]
    return [torch.split(tensor.view(-1), length) for tensor in tensors]


def is_at_hand(tensor: Tensor) -> bool:
    """Whether its values can be read without waiting for a device."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def clear_unless(flag: Tensor, tensors: list[Tensor]) -> None:
    """Zero all tensors in place where the flag, 0-dim, is False. By their bits: infinity times zero is not zero."""
    masks: dict[torch.dtype, Tensor] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        integer = _INTEGERS[real.itemsize]
        if integer not in masks:
            masks[integer] = -flag.to(integer)  # all bits, or none
        real.view(integer).bitwise_and_(masks[integer])


def can_be_cleared(tensor: Tensor) -> bool:
    """Whether :func:`clear_unless` can write to it: expanded tensors and lazy negations or conjugates cannot be."""
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not (is_expanded or tensor.is_neg() or tensor.is_conj())


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def combine(
    values: list[Tensor],
    stepped: list[Tensor],
    deltas: list[Tensor],
    scale: Tensor,
    change: Tensor,
    kept: Tensor | None = None,
) -> None:
    """Scale what the base did, in place.

    On entry ``values`` hold x and ``stepped`` x + u. On return ``deltas`` hold Delta' = k Delta + u and ``values``
    x' = x + S u + (S' - S) Delta'. With S of before divided by k that is x + S' Delta' - S Delta: the difference form.
    It never needs x_1, and keeps whatever others did to the parameters between steps. ``stepped`` is used up.
    """
    for x, u, d in _batches(values, stepped, deltas):
        torch._foreach_sub_(u, x)
        if kept is not None:
            torch._foreach_mul_(d, kept)
        torch._foreach_add_(d, u)
        _add_scaled(x, u, scale)
        _add_scaled(x, d, change)


def retreat(
    values: list[Tensor], deltas: list[Tensor], scale: Tensor, decay: float, kept: Tensor | None = None
) -> None:
    """x - S Delta and k Delta - decay x, in place: where a base that is to step on Delta finds nothing of x."""
    of_delta = (1.0 if kept is None else kept) - decay * scale  # x is x + S Delta by the time it is taken
    of_value = torch.full_like(scale, -decay)
    for x, d in _batches(values, deltas):
        _add_scaled(x, d, -scale)
        if decay or kept is not None:
            torch._foreach_mul_(d, of_delta)
        if decay:
            _add_scaled(d, x, of_value)


def undo_retreat(
    values: list[Tensor], deltas: list[Tensor], scale: Tensor, decay: float, kept: Tensor | None = None
) -> None:
    """Take :func:`retreat` back, in place, up to rounding."""
    of_delta = (1.0 if kept is None else kept) - decay * scale
    for x, d in _batches(values, deltas):
        if decay:
            _add_scaled(d, x, torch.full_like(scale, decay))
        if decay or kept is not None:
            torch._foreach_mul_(d, 1 / of_delta)
        _add_scaled(x, d, scale)


def rescale(values: list[Tensor], deltas: list[Tensor], factor: Tensor) -> None:
    """x += factor Delta, in place."""
    _add_scaled(values, deltas, factor)


def interpolate(values: list[Tensor], stepped: list[Tensor], scale: Tensor | None) -> None:
    """x += S u, in place, where ``stepped`` holds x + u and is used up: the step of a frozen scale. None is S = 1."""
    if scale is None:
        torch._foreach_copy_(values, stepped)
        return
    for x, u in _batches(values, stepped):
        torch._foreach_sub_(u, x)
        _add_scaled(x, u, scale)


def _add_scaled(values: list[Tensor], directions: list[Tensor], factor: Tensor) -> None:
    torch._foreach_addcmul_(values, directions, [factor] * len(values))


def with_residuals(params: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
    """The values that half-precision parameters stand for: what is stored, and what rounding cut off, in float32."""
    values = []
    for p, residual in zip(params, residuals, strict=True):
        value = residual.to(torch.float32).add_(p)
        # Where it rounds to something else, somebody has written to the parameter since: then that is the value.
        values.append(torch.where(value.to(p.dtype) == p, value, p.to(torch.float32)))
    return values


def store_rounded(values: list[Tensor], params: list[Tensor], residuals: list[Tensor]) -> None:
    """Round float32 values into half-precision parameters, and keep what that cuts off. ``values`` is used up."""
    for value, p, residual in zip(values, params, residuals, strict=True):
        p.copy_(value)
        residual.copy_(value.sub_(p))
        # A residual rounded up to half of the parameter's last bit would pass for somebody's write.
        ambiguous = value.copy_(residual).add_(p).to(p.dtype) != p
        residual.copy_(torch.where(ambiguous, residual * (1 - torch.finfo(RESIDUAL_DTYPE).eps), residual))
