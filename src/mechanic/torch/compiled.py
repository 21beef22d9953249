"""The step compiled: the sums in one pass over memory, and base and Mechanic together in another.

Every kernel is a function of flat tensors with sizes and all numbers left open, so it is compiled once, in seconds,
whatever the model, the schedule and S do. Long tensors are passed as flat views of the user's own; short ones are
joined for the call, and what it changed is copied back.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch import vectors
from mechanic.torch.bases import has_hooks
from mechanic.torch.buckets import Bucket
from mechanic.torch.checkpoint import DELTA
from mechanic.torch.groups import Group, rows_of
from mechanic.torch.vectors import is_half_precision

SHORT = 1 << 14
"""Tensors of fewer elements are joined, up to :data:`LONGEST_JOIN`: a call of a compiled kernel costs some 60 µs."""

LONGEST_JOIN = 1 << 17
"""Longer joins leave the cache, and their memory is mapped anew every time."""

TINY = 1 << 12
"""So few elements need no compiled kernel; and torch would compile another for them."""


# Around any base: the same functions as in :mod:`mechanic.torch.vectors`.


def measure(
    params: list[Tensor], grads: list[Tensor], deltas: list[Tensor], sign: float, device: torch.device
) -> Tensor:
    """As :func:`mechanic.torch.vectors.measure`."""
    if not (grads and deltas):
        return vectors.measure(params, grads, deltas, sign, device)
    parts = [_compiled(_five_sums, flat)(*flat) for flat, _ in _flat([params, grads, deltas], written=())]
    dtype = vectors.tuner_dtype(device)
    delta_grad, *others = torch.stack([part.to(dtype) for part in parts]).sum(0).unbind()
    return torch.stack([sign * delta_grad, *others])


def combine(
    values: list[Tensor],
    stepped: list[Tensor],
    deltas: list[Tensor],
    scale: Tensor,
    change: Tensor,
    kept: Tensor | None = None,
) -> None:
    """As :func:`mechanic.torch.vectors.combine`."""
    _run(_combine, [values, stepped, deltas], (0, 2), scale, change, torch.ones_like(scale) if kept is None else kept)


def retreat(
    values: list[Tensor], deltas: list[Tensor], scale: Tensor, decay: float, kept: Tensor | None = None
) -> None:
    """As :func:`mechanic.torch.vectors.retreat`."""
    if not decay and kept is None:
        vectors.retreat(values, deltas, scale, decay)
    else:
        kept = torch.ones_like(scale) if kept is None else kept
        _run(_retreat, [values, deltas], (0, 1), scale, torch.full_like(scale, decay), kept)


def _five_sums(x: Tensor, g: Tensor, d: Tensor) -> Tensor:
    # On CPUs torch 2.5 compiles a sum to one running number; in float32 that loses 0.5 % at 10^8 elements.
    dtype = torch.float64 if x.device.type == "cpu" else None
    return torch.stack([(a * b).sum(dtype=dtype) for a, b in ((d, g), (d, x), (g, g), (x, x), (d, d))])


def _combine(x: Tensor, stepped: Tensor, d: Tensor, scale: Tensor, change: Tensor, kept: Tensor) -> None:
    u = stepped - x
    new_delta = kept * d + u
    x.copy_(x + scale * u + change * new_delta)
    d.copy_(new_delta)


def _retreat(x: Tensor, d: Tensor, scale: Tensor, decay: Tensor, kept: Tensor) -> None:
    new_delta = kept * d - decay * x
    x.copy_(x - scale * d)
    d.copy_(new_delta)


# Base and Mechanic in one kernel, for bases whose rule is written out here.


class Rule(NamedTuple):
    """A base's step and Mechanic's as a kernel, and where to find what it needs."""

    kernel: Callable[..., None]
    read: Callable[[Any, Group], tuple[list[list[Tensor]], list[tuple[float, ...]]]]  # tensors; numbers by parameter


def _adam(x: Tensor, g: Tensor, m: Tensor, v: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    lr, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, l2 = numbers
    g = g + l2 * x
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return -lr * (decay * x + correction1 * m / (correction2 * v.sqrt() + eps)), m, v


def _read_adam(base: Any, group: Group) -> tuple[list[list[Tensor]], list[tuple[float, ...]]]:
    found: dict[str, Any] = {name: [] for name in _lists_to_fill(base._init_group.__func__)}
    if "amsgrad" in found:  # until torch 2.6 AdamW has a flag among the lists
        found["amsgrad"] = group["amsgrad"]
    base._init_group(group, **found)  # makes the state where there is none, as the base's own step does
    first, second, steps = found["exp_avgs"], found["exp_avg_sqs"], found["state_steps"]
    torch._foreach_add_(steps, 1)
    lr, (beta1, beta2), decay = group["lr"] / group["mechanic_unit"], group["betas"], group["weight_decay"]
    is_decoupled = type(base) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
    decays = (decay, 0.0) if is_decoupled else (0.0, decay)
    by_step: dict[float, tuple[float, ...]] = {}
    for t in (values := [step.item() for step in steps]):
        if t not in by_step:
            corrections = 1 / (1 - beta1**t), (1 - beta2**t) ** -0.5
            by_step[t] = (lr, beta1, 1 - beta1, beta2, 1 - beta2, *corrections, group["eps"], *decays)
    return [first, second], [by_step[t] for t in values]


@functools.cache
def _lists_to_fill(init_group: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments of Adam's ``_init_group`` after self and the group; they differ between versions of torch."""
    return tuple(inspect.signature(init_group).parameters)[2:]


def _sgd(x: Tensor, g: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    lr, l2 = numbers
    return (-lr * (g + l2 * x),)


def _momentum(x: Tensor, g: Tensor, buffer: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    lr, l2, momentum, gain, nesterov_gain, nesterov_momentum = numbers
    g = g + l2 * x
    buffer = momentum * buffer + gain * g
    return -lr * (nesterov_gain * g + nesterov_momentum * buffer), buffer


def _read_sgd(base: Any, group: Group) -> tuple[list[list[Tensor]], list[tuple[float, ...]]]:
    lr, decay, momentum = group["lr"] / group["mechanic_unit"], group["weight_decay"], group["momentum"]
    if not momentum:
        return [], [(lr, decay)] * len(group["params"])
    nesterov = (1.0, momentum) if group["nesterov"] else (0.0, 1.0)
    buffers, numbers = [], []
    for p in group["params"]:
        state = base.state[p]
        is_first = state.get("momentum_buffer") is None
        if is_first:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffers.append(state["momentum_buffer"])
        numbers.append((lr, decay, momentum, 1.0 if is_first else 1 - group["dampening"], *nesterov))
    return [buffers], numbers


def rule_of(base: Optimizer, group: Group) -> Rule:
    if type(base) is torch.optim.SGD:
        return Rule(_whole_momentum if group["momentum"] else _whole_sgd, _read_sgd)
    return Rule(_whole_adam, _read_adam)


def choose_kernels(base: Optimizer, buckets: list[Bucket], *, own_iterates: bool) -> tuple[bool, list[str]]:
    """Let the buckets work compiled where they can.

    Returns whether base and Mechanic are to step as one, and what had to be left out, for the user to know.
    """
    if reason := why_not_at_all():
        return False, [f"compile=True has no effect: {reason}"]
    left_out = []
    for bucket in buckets:
        if bucket.sharded or is_half_precision(bucket.dtype) or bucket.dtype.is_complex:
            kind = "sharded" if bucket.sharded else str(bucket.dtype)
            left_out.append(f"compile=True leaves {kind} parameters to the eager step")
        else:
            bucket.work = sys.modules[__name__]
    if left_out:
        return False, left_out
    reason = "the base steps on iterates of its own" if own_iterates else why_not_whole(base)
    return reason is None, [f"compile=True compiles around the base, not together with it: {reason}"] if reason else []


def why_not_whole(base: Optimizer) -> str | None:
    """What keeps base and Mechanic from being compiled as one; None where nothing does."""
    if type(base) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return f"{type(base).__name__} is not one of torch's SGD, Adam and AdamW"
    if has_hooks(base):
        return f"hooks are registered on the step of {type(base).__name__}"
    for group in base.param_groups:
        if isinstance(group["lr"], Tensor) or group.get("capturable"):
            return "its learning rate is a tensor, or it is capturable"
        if group.get("amsgrad"):
            return "it uses amsgrad"
        if group.get("fused") and any(p.device.type != "cpu" for p in group["params"]):
            return "it is fused, and counts its steps on the device"
    return None


def step_whole(
    base: Optimizer,
    delta_of: dict[Tensor, Tensor],
    scale: Tensor,
    new_scale: Tensor,
    kept: Tensor | None,
    finite: Tensor,
) -> None:
    """The base's step and Mechanic's on all parameters with a gradient.

    S, S', the share of Delta to keep and the flags of gradients are [tuners].
    """
    kept = torch.ones_like(scale) if kept is None else kept
    scale = scale / kept
    rows = rows_of(base.param_groups)
    for group in base.param_groups:
        group = {**group, "params": [p for p in group["params"] if p.requires_grad and p.grad is not None]}
        if not group["params"]:
            continue
        rule = rule_of(base, group)
        tensors, numbers = rule.read(base, group)
        alike = defaultdict(list)  # parameters that one call can take
        for index, p in enumerate(group["params"]):
            alike[p.device, p.dtype, numbers[index]].append(index)
        row = rows[group["mechanic_row"]]
        for (device, dtype, values), indices in alike.items():
            params = [group["params"][i] for i in indices]
            for p in params:
                base.state[p][DELTA] = delta_of[p]  # only now: bases ask whether state[p] is empty to initialise it
            sign = -1.0 if group.get("maximize") else 1.0
            scalars = torch.tensor([sign, *values], dtype=dtype, device=device).unbind()
            scales = [s[row].to(device, dtype) for s in (scale, new_scale - scale, kept)]
            of_base = [[tensors_of[i] for i in indices] for tensors_of in tensors]
            deltas = [delta_of[p] for p in params]
            lists = [params, [p.grad for p in params], deltas, *of_base]
            written = (0, *range(2, len(lists)))
            _run(rule.kernel, lists, written, finite[row].to(device), *scales, *scalars)
    base._opt_called = True  # type: ignore[attr-defined]  # schedulers that were built on it ask


# One function each: torch counts how often a function has been compiled, and gives up on it at some point.


def _whole_sgd(x: Tensor, g: Tensor, d: Tensor, *numbers: Tensor) -> None:
    _whole(_sgd, x, g, d, (), *numbers)


def _whole_momentum(x: Tensor, g: Tensor, d: Tensor, buffer: Tensor, *numbers: Tensor) -> None:
    _whole(_momentum, x, g, d, (buffer,), *numbers)


def _whole_adam(x: Tensor, g: Tensor, d: Tensor, m: Tensor, v: Tensor, *numbers: Tensor) -> None:
    _whole(_adam, x, g, d, (m, v), *numbers)


def _whole(
    rule: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    g: Tensor,
    d: Tensor,
    of_base: tuple[Tensor, ...],
    finite: Tensor,
    scale: Tensor,
    change: Tensor,
    kept: Tensor,
    sign: Tensor,
    *numbers: Tensor,
) -> None:
    u, *new_of_base = rule(x, torch.where(finite, sign * g, torch.zeros_like(g)), *of_base, *numbers)
    new_delta = kept * d + u
    x.copy_(x + scale * u + change * new_delta)
    d.copy_(new_delta)
    for old, new in zip(of_base, new_of_base, strict=True):
        old.copy_(new)


# Calling kernels.


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _compiled(function: Callable[..., Any], flat: list[Tensor]) -> Callable[..., Any]:
    return function if flat[0].numel() <= TINY else _compile(function)


def _run(function: Callable[..., Any], lists: list[list[Tensor]], written: Sequence[int], *numbers: Tensor) -> None:
    """Call a kernel on lists of equal shapes, some of which it writes to."""
    for flat, originals in _flat(lists, written):
        _compiled(function, flat)(*flat, *numbers)
        for index, tensors in originals.items():
            torch._foreach_copy_(tensors, torch._C._nn.unflatten_dense_tensors(flat[index], tensors))
    for index in written:
        for tensor in lists[index]:
            torch.autograd.graph.increment_version(tensor)  # as any write does: a stale backward pass must fail


def _flat(lists: list[list[Tensor]], written: Sequence[int]) -> Iterator[tuple[list[Tensor], dict[int, list[Tensor]]]]:
    """Flat tensors for one call after the other, and which tensors they are copies of, of those that are written."""
    joined: list[tuple[Tensor, ...]] = []
    size = 0
    for tensors in zip(*lists, strict=True):
        elements = tensors[0].numel()
        if elements >= SHORT and (views := _flat_views(tensors)):
            yield views, {}
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
    flat = [torch._C._nn.flatten_dense_tensors(column).data for column in columns]
    if len(rows) == 1:  # a view of the tensor itself, if it can be one
        flat = [tensor.clone() if index in written else tensor for index, tensor in enumerate(flat)]
    return flat, {index: columns[index] for index in written}


def _flat_views(tensors: tuple[Tensor, ...]) -> list[Tensor] | None:
    """Flat views of tensors of one shape with the same order of elements; None where their memory has none."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        order = sorted(range(tensors[0].ndim), key=tensors[0].stride, reverse=True)
        tensors = tuple(tensor.permute(order) for tensor in tensors)
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
    # .data, so that they are nobody's views: torch compiles apart for those.
    return [tensor.view(-1).data for tensor in tensors]


@functools.cache
def why_not_at_all() -> str | None:
    """What keeps torch from compiling here; None where it does. Tries it once."""
    tensors = [torch.zeros(2 * TINY) for _ in range(3)]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of torch's about itself
            _compile(_five_sums)(*tensors)
    except Exception as error:  # whatever a missing compiler, Python or platform leads to
        return f"torch.compile fails with {type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
    return None
