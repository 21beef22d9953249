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


def tuner_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it: 1 - 0.999999 leaves one digit of a float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def delta_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32: a sum of many small updates outgrows half precision."""
    return torch.promote_types(dtype, torch.float32)


def measure(
    params: list[Tensor], grads: list[Tensor], deltas: list[Tensor], sign: float, device: torch.device
) -> Tensor:
    """The five sums of :data:`mechanic.tuner.SUMS` over parameters on one device, [5].

    ``grads`` are those of all parameters, or empty where none has one; ``sign`` is -1 where the base ascends.
    """
    delta_grad = dot(deltas, grads, device) if grads else dot([], [], device)
    squares = [dot(tensors, tensors, device) for tensors in (grads, params, deltas)]
    return torch.stack([sign * delta_grad, dot(deltas, params, device), *squares])


def dot(a: list[Tensor], b: list[Tensor], device: torch.device) -> Tensor:
    """The sum of Re<a_i, b_i> over two lists of equal shapes, as a 0-dim tensor in the tuner's dtype."""
    dtype = tuner_dtype(device)
    parts = [torch.dot(x, y) for x, y in zip(_pieces(a), _pieces(b), strict=True)]
    return torch.stack(parts).to(dtype).sum() if parts else torch.zeros((), dtype=dtype, device=device)


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
                yield piece.to(delta_dtype(piece.dtype))
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
    return joined.to(delta_dtype(joined.dtype))


def rescale(params: list[Tensor], deltas: list[Tensor], change: Tensor) -> None:
    """x += (S' - S) Delta, in place."""
    torch._foreach_addcmul_(params, deltas, [change] * len(params))


def combine(params: list[Tensor], before: list[Tensor], deltas: list[Tensor], scale: Tensor, change: Tensor) -> None:
    """Turn the base's step x + u into Mechanic's, in place.

    On entry ``params`` hold x + u and ``before`` x; on return ``deltas`` hold Delta' = Delta + u and
    ``params`` x' = x + S u + (S' - S) Delta', which is x + (S' - S) Delta + S' u: the difference form.
    It never needs x_1, and keeps whatever others did to the parameters between steps. x comes from
    ``before``, not from subtracting u again: that would drift by a rounding error every step.
    """
    torch._foreach_sub_(params, before)  # u
    torch._foreach_add_(deltas, params)
    torch._foreach_mul_(params, scale)
    torch._foreach_add_(params, before)
    rescale(params, deltas, change)
