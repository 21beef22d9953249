"""The work on a Delta that is stored in fewer bytes: decoded, used and encoded piece by piece.

As in :mod:`mechanic.torch.kernels.eager`, lists are of equal length and shapes and factors are 0-dim tensors. The
parameters move by what Delta is before it is rounded: x' = x + S' Delta' - S Delta with Delta as it was stored and
Delta' as it was not yet. So its rounding reaches x only later, times the change of S.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mechanic.torch.kernels.eager import is_on_host, total
from mechanic.torch.kernels.rounding import store_rounded, values_of, working_dtype
from mechanic.torch.kernels.storage import ROW, Noise, Stored, decode, encode
from mechanic.torch.kernels.whole import flat_views

ROWS = {"cpu": 4}
"""How many times ROW elements are worked on at a time, by type of device: on a CPU, what stays in a core's cache."""

ROWS_ELSEWHERE = 64


def measure(
    params: list[Tensor], grads: list[Tensor], stored: list[Stored], sign: float, device: torch.device
) -> Tensor:
    """See :func:`mechanic.torch.kernels.eager.measure`."""
    none = torch.zeros((), device=device)
    parts = []
    for one, x, *rest in _pieces(stored, params, *([grads] if grads else [])):
        x = _row(x)
        d = _row(_decoded(one, x.dtype))
        parts += [none, torch.dot(d, x), none, torch.dot(x, x), torch.dot(d, d)]
        if rest:
            g = _row(rest[0]).to(x.dtype)
            parts[-5], parts[-3] = torch.dot(d, g), torch.dot(g, g)
    delta_grad, *others = total(parts, 5, device).unbind()
    return torch.stack([sign * delta_grad, *others])


def working_deltas(
    stored: list[Stored], dtype: torch.dtype, retention: Tensor | None, values: list[Tensor], decay: float
) -> list[Tensor]:
    """k Delta - decay x: what a base steps on in place of x. ``values`` are not needed if nothing decays."""
    deltas = [torch.empty_like(one.codes, dtype=dtype) for one in stored]
    for one, delta in _pieces(stored, deltas):
        if dtype == torch.float32:
            decode(one, out=delta)
        else:
            delta.copy_(decode(one))
        _times(delta, retention)
    if decay:
        for delta, x in zip(deltas, values, strict=True):
            delta.add_(x, alpha=-decay)
    return deltas


def move_along(
    values: list[Tensor], deltas: list[Tensor], stored: list[Stored], before: Tensor, after: Tensor, noise: Noise
) -> None:
    """x <- x + S' Delta' - S Delta, where ``deltas`` hold Delta', which is then stored in place of Delta."""
    for one, x, new_delta in _pieces(stored, values, deltas):
        _add(x, _decoded(one, x.dtype), -before)
        _add(x, new_delta, after)
        encode(new_delta, one, noise)


def combine(
    values: list[Tensor],
    stepped: list[Tensor],
    stored: list[Stored],
    scale: Tensor,
    change: Tensor,
    retention: Tensor | None,
    noise: Noise,
) -> None:
    """See :func:`mechanic.torch.kernels.eager.combine`. ``stepped`` is overwritten."""
    for one, x, u in _pieces(stored, values, stepped):
        u.sub_(x)
        new_delta = _times(_decoded(one, x.dtype), retention).add_(u)
        _add(x, u, scale)
        _add(x, new_delta, change)
        encode(new_delta, one, noise)


def rescale(values: list[Tensor], stored: list[Stored], change: Tensor, retention: Tensor | None, noise: Noise) -> None:
    """Delta' <- k Delta; x <- x + (S' - S) Delta': a step without an update."""
    for one, x in _pieces(stored, values):
        new_delta = _times(_decoded(one, x.dtype), retention)
        _add(x, new_delta, change)
        if retention is not None and one.scales is not None:
            one.scales.mul_(retention)  # which multiplies all elements of a block, without rounding
        elif retention is not None:
            encode(new_delta, one, noise)


def add_updates(
    params: list[Tensor],
    residuals: list[Tensor],
    updates: list[Tensor],
    stored: list[Stored],
    scale: Tensor,
    change: Tensor,
    retention: Tensor | None,
    decay: float,
    noise: Noise,
) -> None:
    """:func:`combine` for half-precision parameters that the base has not seen: it stepped on zeros, which hold u now.

    The weight decay is added to u here. Values in float32 are made piece by piece, never of a whole tensor.
    """
    for one, p, residual, update in _pieces(stored, params, residuals, updates):
        (x,) = values_of([p], [residual])
        u = _with_decay(update, x, decay)
        new_delta = _times(decode(one), retention).add_(u)
        _add(x, u, scale)
        _add(x, new_delta, change)
        encode(new_delta, one, noise)
        store_rounded([x], [p], [residual])


def add_frozen_updates(
    params: list[Tensor], residuals: list[Tensor], updates: list[Tensor], scale: Tensor, decay: float
) -> None:
    """x <- x + S u, as in :func:`add_updates` but without Delta."""
    for one, residual, update in _pieces([Stored(p) for p in params], residuals, updates):
        (x,) = values_of([one.codes], [residual])
        _add(x, _with_decay(update, x, decay), scale)
        store_rounded([x], [one.codes], [residual])


def add_scaled(values: list[Tensor], stored: list[Stored], factor: Tensor) -> None:
    """x <- x + factor Delta."""
    for one, x in _pieces(stored, values):
        _add(x, _decoded(one, x.dtype), factor)


def _pieces(stored: list[Stored], *lists: list[Tensor]) -> Iterator[tuple[Any, ...]]:
    """Cut tensors at the same elements, into flat views; whole where the orders in memory differ."""
    for one, *tensors in zip(stored, *lists, strict=True):
        if not (elements := one.codes.numel()):
            continue
        views = flat_views([one.codes, *tensors])
        if views is None:
            yield one, *tensors
            continue
        codes, *flat = views
        whole = Stored(codes, one.scales, one.number, one.first)
        length = ROW * ROWS.get(codes.device.type, ROWS_ELSEWHERE)
        for first in range(0, elements, length):
            end = min(first + length, elements)
            yield whole.part(first, end), *(view[first:end] for view in flat)


def _decoded(stored: Stored, dtype: torch.dtype) -> Tensor:
    return decode(stored).to(dtype)


def _row(tensor: Tensor) -> Tensor:
    """As a flat tensor in at least float32, in the order of its elements."""
    return tensor.reshape(-1).to(working_dtype(tensor.dtype))


def _with_decay(update: Tensor, x: Tensor, decay: float) -> Tensor:
    """u - decay x, in the dtype of x."""
    u = update.to(x.dtype)
    return u.add_(x, alpha=-decay) if decay else u


def _times(values: Tensor, factor: Tensor | None) -> Tensor:
    return values if factor is None else values.mul_(factor)


def _add(values: Tensor, directions: Tensor, factor: Tensor) -> None:
    """x <- x + factor d."""
    if is_on_host(factor):
        values.add_(directions, alpha=float(factor))
    else:
        values.addcmul_(directions, factor)
