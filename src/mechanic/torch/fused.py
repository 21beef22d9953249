"""Base and Mechanic in one compiled kernel, for bases whose rule is written out here: torch's SGD, Adam and AdamW."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.bases import has_hooks
from mechanic.torch.buckets import Bucket, Scaling
from mechanic.torch.kernels import compiled
from mechanic.torch.kernels.rounding import is_half_precision
from mechanic.torch.layout import DELTA, PEAK_LR, ROW, Group
from mechanic.torch.private import foreach_add_, init_adam_state, mark_as_stepped
from mechanic.torch.tuners import rows_of


def choose_kernels(base: Optimizer, buckets: list[Bucket], *, own_iterates: bool) -> tuple[bool, list[str]]:
    """Give the buckets compiled kernels if they can use them.

    Returns whether base and Mechanic can step in one kernel, and messages for the user about what is not compiled.
    """
    if reason := compiled.reason_not_to_compile():
        return False, [f"compile=True has no effect: {reason}"]
    left_out = []
    for bucket in buckets:
        if bucket.sharded or is_half_precision(bucket.dtype) or bucket.dtype.is_complex:
            kind = "sharded" if bucket.sharded else str(bucket.dtype)
            left_out.append(f"compile=True leaves {kind} parameters to the eager step")
        else:
            bucket.kernels = compiled
    if left_out:
        return False, left_out
    reason = "the base steps on iterates of its own" if own_iterates else reason_not_to_fuse(base)
    return reason is None, [f"compile=True compiles around the base, not together with it: {reason}"] if reason else []


def reason_not_to_fuse(base: Optimizer) -> str | None:
    """Why base and Mechanic cannot step in one kernel; None if they can."""
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


def step_fused(base: Optimizer, buckets: list[Bucket], scaling: Scaling, finite: Tensor) -> None:
    """The base's step and Mechanic's on all parameters. ``finite``, [tuners], tells which gradients are finite."""
    delta_of = {
        p: kept[DELTA] for b in buckets if b.has_grad for p, kept in zip(b.params, b.mechanic_state, strict=True)
    }
    retention = torch.ones_like(scaling.before) if scaling.delta_retention is None else scaling.delta_retention
    scale = scaling.before / retention
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
        row = rows[group[ROW]]
        for (device, dtype, values), indices in alike.items():
            params = [group["params"][i] for i in indices]
            for p in params:
                base.state[p][DELTA] = delta_of[p]  # only now: a base initialises state[p] if it is empty
            sign = -1.0 if group.get("maximize") else 1.0
            scalars = torch.tensor([sign, *values], dtype=dtype, device=device).unbind()
            scales = [s[row].to(device, dtype) for s in (scale, scaling.after - scale, retention)]
            of_base = [[tensors_of[i] for i in indices] for tensors_of in tensors]
            lists = [params, [p.grad for p in params], [delta_of[p] for p in params], *of_base]
            written = (0, *range(2, len(lists)))
            compiled.run(rule.kernel, lists, written, finite[row].to(device), *scales, *scalars)
    mark_as_stepped(base)
    for bucket in buckets:
        if not bucket.has_grad:
            bucket.move([])


class Rule(NamedTuple):
    """A base's step and Mechanic's as one kernel, and where to find what it needs."""

    kernel: Callable[..., None]
    read: Callable[[Any, Group], tuple[list[list[Tensor]], list[tuple[float, ...]]]]  # tensors; numbers by parameter


def rule_of(base: Optimizer, group: Group) -> Rule:
    if type(base) is torch.optim.SGD:
        return Rule(fused_momentum if group["momentum"] else fused_sgd, _read_sgd)
    return Rule(fused_adam, _read_adam)


def adam(x: Tensor, g: Tensor, m: Tensor, v: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    lr, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, l2 = numbers
    g = g + l2 * x
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return -lr * (decay * x + correction1 * m / (correction2 * v.sqrt() + eps)), m, v


def _read_adam(base: Any, group: Group) -> tuple[list[list[Tensor]], list[tuple[float, ...]]]:
    state = init_adam_state(base, group)
    first, second, steps = state["exp_avgs"], state["exp_avg_sqs"], state["state_steps"]
    foreach_add_(steps, 1)
    lr, (beta1, beta2), decay = group["lr"] / group[PEAK_LR], group["betas"], group["weight_decay"]
    is_decoupled = type(base) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
    decays = (decay, 0.0) if is_decoupled else (0.0, decay)
    by_step: dict[float, tuple[float, ...]] = {}
    for t in (values := [step.item() for step in steps]):
        if t not in by_step:
            corrections = 1 / (1 - beta1**t), (1 - beta2**t) ** -0.5
            by_step[t] = (lr, beta1, 1 - beta1, beta2, 1 - beta2, *corrections, group["eps"], *decays)
    return [first, second], [by_step[t] for t in values]


def sgd(x: Tensor, g: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    lr, l2 = numbers
    return (-lr * (g + l2 * x),)


def momentum_sgd(x: Tensor, g: Tensor, buffer: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    lr, l2, momentum, gain, nesterov_gain, nesterov_momentum = numbers
    g = g + l2 * x
    buffer = momentum * buffer + gain * g
    return -lr * (nesterov_gain * g + nesterov_momentum * buffer), buffer


def _read_sgd(base: Any, group: Group) -> tuple[list[list[Tensor]], list[tuple[float, ...]]]:
    lr, decay, momentum = group["lr"] / group[PEAK_LR], group["weight_decay"], group["momentum"]
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


# One function for each: torch counts how often a function has been compiled, and gives up on it at some point.


def fused_sgd(x: Tensor, g: Tensor, d: Tensor, *numbers: Tensor) -> None:
    _fused(sgd, x, g, d, (), *numbers)


def fused_momentum(x: Tensor, g: Tensor, d: Tensor, buffer: Tensor, *numbers: Tensor) -> None:
    _fused(momentum_sgd, x, g, d, (buffer,), *numbers)


def fused_adam(x: Tensor, g: Tensor, d: Tensor, m: Tensor, v: Tensor, *numbers: Tensor) -> None:
    _fused(adam, x, g, d, (m, v), *numbers)


def _fused(
    rule: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    g: Tensor,
    d: Tensor,
    of_base: tuple[Tensor, ...],
    finite: Tensor,
    scale: Tensor,
    change: Tensor,
    retention: Tensor,
    sign: Tensor,
    *numbers: Tensor,
) -> None:
    u, *new_of_base = rule(x, torch.where(finite, sign * g, torch.zeros_like(g)), *of_base, *numbers)
    new_delta = retention * d + u
    x.copy_(x + scale * u + change * new_delta)
    d.copy_(new_delta)
    for old, new in zip(of_base, new_of_base, strict=True):
        old.copy_(new)
