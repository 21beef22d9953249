"""The work that grows with the model: inner products and updates over lists of tensors.

Nothing here reads a value on the host, so a step never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LONGEST_DOT = 1 << 20
"""In elements. One long fp32 dot loses digits (5e-4 at 1e8 elements); a sum of shorter ones does not."""

SHORT = 1 << 16
"""Tensors of fewer elements are joined before the dot: there a call costs more than a copy."""

RESIDUAL_DTYPE = torch.bfloat16
"""Two bytes with the range of float32: eight more bits below the last one of a half-precision parameter."""


def tuner_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it: 1 - 0.999999 leaves one digit of a float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32, for Delta and for the values a base steps on: a sum of small steps outgrows half precision."""
    return torch.promote_types(dtype, torch.float32)


def measure(
    params: list[Tensor], grads: list[Tensor], deltas: list[Tensor], sign: float, device: torch.device
) -> Tensor:
    """The five sums of :data:`mechanic.tuner.SUMS` over parameters on one device, [5].

    ``grads`` and ``deltas`` are those of all parameters, or empty where none has one and they count as zero;
    ``sign`` is -1 where the base ascends.
    """
    delta_grad = dot(deltas, grads, device) if grads else dot([], [], device)
    delta_param = dot(deltas, params, device) if deltas else dot([], [], device)
    squares = [dot(tensors, tensors, device) for tensors in (grads, params, deltas)]
    return torch.stack([sign * delta_grad, delta_param, *squares])


def dot(a: list[Tensor], b: list[Tensor], device: torch.device) -> Tensor:
    """The sum of Re<a_i, b_i> over two lists of equal shapes, as a 0-dim tensor in the tuner's dtype."""
    dtype = tuner_dtype(device)
    if not all(tensor.is_contiguous() for tensor in a):
        a, b = _in_memory_order(a, b)
    parts = [torch.dot(x, y) for x, y in zip(_pieces(a), _pieces(b), strict=True)]
    return torch.stack(parts).to(dtype).sum() if parts else torch.zeros((), dtype=dtype, device=device)


def _in_memory_order(a: list[Tensor], b: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Both with their dimensions in the order of a's memory, so that flattening equal layouts copies nothing."""
    orders = [sorted(range(tensor.ndim), key=tensor.stride, reverse=True) for tensor in a]
    permuted = [[t.permute(order) for t, order in zip(tensors, orders, strict=True)] for tensors in (a, b)]
    return permuted[0], permuted[1]


def _pieces(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The list as flat real pieces in at least float32: long tensors split, short ones joined.

    Lists of equal shapes come apart at the same places, whatever their dtypes.
    """
    waiting: list[Tensor] = []
    waiting_size = 0
    for tensor in tensors:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        if flat.numel() >= SHORT:
            for piece in torch.split(flat, LONGEST_DOT):
                yield piece.to(working_dtype(piece.dtype))
            continue
        waiting.append(flat)
        waiting_size += flat.numel()
        if waiting_size >= SHORT:
            yield _join(waiting)
            waiting, waiting_size = [], 0
    if waiting:
        yield _join(waiting)


def _join(flat: list[Tensor]) -> Tensor:
    joined = torch.cat(flat) if len(flat) > 1 else flat[0]
    return joined.to(working_dtype(joined.dtype))


def combine(values: list[Tensor], stepped: list[Tensor], deltas: list[Tensor], scale: Tensor, change: Tensor) -> None:
    """Scale what the base did, in place.

    On entry ``values`` hold x and ``stepped`` x + u. On return ``deltas`` hold Delta' = Delta + u and ``values``
    x' = x + S u + (S' - S) Delta', which is x + (S' - S) Delta + S' u: the difference form. It never needs x_1, and
    keeps whatever others did to the parameters between steps. ``stepped`` is used up.
    """
    torch._foreach_sub_(stepped, values)  # u
    torch._foreach_add_(deltas, stepped)
    _add_scaled(values, stepped, scale)
    rescale(values, deltas, change)


def rescale(values: list[Tensor], deltas: list[Tensor], factor: Tensor) -> None:
    """x += factor Delta, in place."""
    _add_scaled(values, deltas, factor)


def interpolate(values: list[Tensor], stepped: list[Tensor], scale: Tensor | None) -> None:
    """x += S u, in place, where ``stepped`` holds x + u and is used up: the step of a frozen scale. None is S = 1."""
    if scale is None:
        torch._foreach_copy_(values, stepped)
        return
    torch._foreach_sub_(stepped, values)
    _add_scaled(values, stepped, scale)


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
