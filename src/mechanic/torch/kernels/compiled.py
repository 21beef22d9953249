"""The kernels compiled: the five sums in one pass over memory, and the update in another.

Every kernel is a function of flat tensors with sizes and all numbers left open, so it is compiled once, in seconds,
whatever the model, the schedule and S do. Long tensors are passed as flat views of the user's own. Short ones are
joined for the call, and what it changed is copied back.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mechanic.torch.kernels import eager
from mechanic.torch.kernels.eager import add_scaled, add_scaled_step, restore_delta
from mechanic.torch.kernels.rounding import tuner_dtype
from mechanic.torch.kernels.whole import flat_views
from mechanic.torch.private import flatten, foreach_copy_, unflatten

__all__ = ["add_scaled", "add_scaled_step", "combine", "measure", "prepare_delta", "restore_delta"]  # see Kernels

SHORT = 1 << 14
"""Tensors of fewer elements are joined, up to :data:`LONGEST_JOIN`: a call of a compiled kernel costs some 60 µs."""

LONGEST_JOIN = 1 << 17
"""Longer joins leave the cache, and their memory is mapped anew every time."""

TINY = 1 << 12
"""So few elements need no compiled kernel, and torch would compile another version for them."""


def measure(
    params: list[Tensor], grads: list[Tensor], deltas: list[Tensor], sign: float, device: torch.device
) -> Tensor:
    if not (grads and deltas):
        return eager.measure(params, grads, deltas, sign, device)
    parts = [_compiled(_five_sums, flat)(*flat) for flat, _ in _flat([params, grads, deltas], written=())]
    dtype = tuner_dtype(device)
    delta_grad, *others = torch.stack([part.to(dtype) for part in parts]).sum(0).unbind()
    return torch.stack([sign * delta_grad, *others])


def combine(
    values: list[Tensor],
    stepped: list[Tensor],
    deltas: list[Tensor],
    scale: Tensor,
    change: Tensor,
    retention: Tensor | None = None,
) -> None:
    retention = torch.ones_like(scale) if retention is None else retention
    run(_combine, [values, stepped, deltas], (0, 2), scale, change, retention)


def prepare_delta(
    values: list[Tensor], deltas: list[Tensor], scale: Tensor, decay: float, retention: Tensor | None = None
) -> None:
    if not decay and retention is None:
        eager.prepare_delta(values, deltas, scale, decay)
    else:
        retention = torch.ones_like(scale) if retention is None else retention
        run(_prepare_delta, [values, deltas], (0, 1), scale, torch.full_like(scale, decay), retention)


def _five_sums(x: Tensor, g: Tensor, d: Tensor) -> Tensor:
    # On CPUs torch 2.5 compiles a sum to one running number; in float32 that loses 0.5 % at 10^8 elements.
    dtype = torch.float64 if x.device.type == "cpu" else None
    return torch.stack([(a * b).sum(dtype=dtype) for a, b in ((d, g), (d, x), (g, g), (x, x), (d, d))])


def _combine(x: Tensor, stepped: Tensor, d: Tensor, scale: Tensor, change: Tensor, retention: Tensor) -> None:
    u = stepped - x
    new_delta = retention * d + u
    x.copy_(x + scale * u + change * new_delta)
    d.copy_(new_delta)


def _prepare_delta(x: Tensor, d: Tensor, scale: Tensor, decay: Tensor, retention: Tensor) -> None:
    new_delta = retention * d - decay * x
    x.copy_(x - scale * d)
    d.copy_(new_delta)


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _compiled(function: Callable[..., Any], flat: list[Tensor]) -> Callable[..., Any]:
    return function if flat[0].numel() <= TINY else _compile(function)


def run(function: Callable[..., Any], lists: list[list[Tensor]], written: Sequence[int], *numbers: Tensor) -> None:
    """Call a kernel on lists of equal shapes, some of which it writes to."""
    for flat, originals in _flat(lists, written):
        _compiled(function, flat)(*flat, *numbers)
        for index, tensors in originals.items():
            foreach_copy_(tensors, unflatten(flat[index], tensors))
    for index in written:
        for tensor in lists[index]:
            torch.autograd.graph.increment_version(tensor)  # as any write does, so that a stale backward pass fails


def _flat(lists: list[list[Tensor]], written: Sequence[int]) -> Iterator[tuple[list[Tensor], dict[int, list[Tensor]]]]:
    """Flat tensors for one call after another, and for those that are written, which tensors they are copies of."""
    joined: list[tuple[Tensor, ...]] = []
    size = 0
    for tensors in zip(*lists, strict=True):
        elements = tensors[0].numel()
        if elements >= SHORT and (views := flat_views(tensors)):
            # .data, so that autograd does not see views: torch compiles another version for those.
            yield [view.data for view in views], {}
            continue
        joined.append(tensors)
        size += elements
        if size >= LONGEST_JOIN:
            yield _copies(joined, written)
            joined, size = [], 0
    if size:
        yield _copies(joined, written)


def _copies(rows: list[tuple[Tensor, ...]], written: Sequence[int]) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
    columns = [list(column) for column in zip(*rows, strict=True)]
    flat = [flatten(column).data for column in columns]
    if len(rows) == 1:  # flatten returns a view of the tensor itself if it can
        flat = [tensor.clone() if index in written else tensor for index, tensor in enumerate(flat)]
    return flat, {index: columns[index] for index in written}


@functools.cache
def reason_not_to_compile() -> str | None:
    """Why torch cannot compile on this machine; None if it can. Tries it once."""
    tensors = [torch.zeros(2 * TINY) for _ in range(3)]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            _compile(_five_sums)(*tensors)
    except Exception as error:  # a missing compiler or an unsupported platform can raise anything
        return f"torch.compile fails with {type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
    return None
