"""What a CUDA graph can hold of a step. All else is refused: a replay would repeat old values, and nobody would notice.

While a graph is captured, the work of the device is recorded, and the host's is done once. So nothing may be read on
the host, and no number that changes between steps may come from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mechanic.torch.layout import DELTA, Group, params_of
from mechanic.torch.wrapped import Wrapped


def is_capturing(groups: list[Group]) -> bool:
    """Whether a step is recorded in a CUDA graph now. On CPUs it never is, and nothing is asked."""
    on_cuda = any(group["params"] and group["params"][0].is_cuda for group in groups)
    if not on_cuda or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


def refuse_step(wrapped: Wrapped[Any]) -> None:
    """Raise if a graph is captured that could not hold this step."""
    if is_capturing(wrapped.groups) and (reason := reason_not_to_capture(wrapped)):
        refuse(reason)


def refuse_observation(wrapped: Wrapped[Any]) -> None:
    """Raise if a graph is captured: what was observed is kept from one call to the next."""
    if is_capturing(wrapped.groups):
        refuse("observe() hands over what it has measured on the host; capture training without it")


def refuse(reason: str) -> None:
    raise RuntimeError(f"a CUDA graph cannot hold this step: {reason}")


def reason_not_to_capture(wrapped: Wrapped[Any]) -> str | None:
    """None if a graph can hold the step."""
    if wrapped.skip_nonfinite:
        return (
            "skip_nonfinite=True reads a value on the host in every step. Without it, gradients that are not finite "
            "are replaced by zeros on the device"
        )
    if wrapped.observed is not None:
        return "gradients have been observed, and every replay would use that one observation; step once before"
    return _reason_in_groups(wrapped) or _reason_in_state(wrapped)


def _reason_in_groups(wrapped: Wrapped[Any]) -> str | None:
    name = type(wrapped.base).__name__
    for group in wrapped.groups:
        lr = group.get("lr")
        device = group["params"][0].device if group["params"] else None
        if lr is not None and not isinstance(lr, Tensor):
            return (
                f"the learning rate is a number, {lr:g}, which every replay would use, whatever a scheduler sets; "
                f"build {name} with lr=torch.tensor(1.0, device={str(device)!r})"
            )
        if lr is not None and device is not None and lr.device != device:
            return f"the learning rate is on {lr.device}, and the parameters are on {device}; build it there"
        if type(wrapped.base) is torch.optim.SGD:
            if not group.get("fused"):
                return "SGD reads its learning rate on the host unless it is built with fused=True"
        elif "capturable" not in group:
            return f"{name} has no option 'capturable', so it may count its steps on the host"
        elif not group["capturable"]:
            return f"{name} counts its steps on the host unless it is built with capturable=True"
    return None


def _reason_in_state(wrapped: Wrapped[Any]) -> str | None:
    if not wrapped.peak_is_settled:
        return "it is the first step with a learning rate above 0; make some steps before the capture"
    if wrapped.is_frozen:
        is_first = wrapped.is_linear_in_lr is None
    else:
        state = wrapped.base.state
        trained = (p for p in params_of(wrapped.groups) if p.requires_grad and p.grad is not None)
        is_first = any(DELTA not in state.get(p, ()) for p in trained)
    if is_first:
        return "it is the first step of some parameters, which makes their state; make some steps before the capture"
    return None
