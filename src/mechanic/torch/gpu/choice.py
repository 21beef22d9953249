"""Whether the kernels are used: on CUDA and ROCm, if Triton is there and they agree with the eager step."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mechanic.config import TunerConfig
from mechanic.torch.buckets import Bucket
from mechanic.torch.kernels.rounding import is_half_precision
from mechanic.torch.layout import DELTA, RESIDUAL
from mechanic.torch.shards import Reduction
from mechanic.torch.stored import INT8, StoredBucket, decoded
from mechanic.torch.warn import warn_user
from mechanic.torch.wrapped import Wrapped

Step = Callable[[Wrapped[Any], Reduction, list[Bucket]], None]

VARIABLE = "MECHANIC_KERNELS"
"""``eager`` turns the kernels off. ``triton`` uses them on every device, CPUs included, as Triton's interpreter can."""

TOLERANCE = 1e-4
"""How far the kernels may be from the eager step after three steps; rounding leaves 1e-6."""


def takes(buckets: list[Bucket], eager: Step) -> bool:
    """Whether the kernels are to make a step on these parameters, instead of ``eager``."""
    stored = [bucket for bucket in buckets if isinstance(bucket, StoredBucket)]
    if not buckets or any(bucket.dtype == torch.float64 for bucket in stored):
        return False
    if any(bucket.sharded and is_half_precision(bucket.dtype) for bucket in buckets):
        return False
    device, wish = buckets[0].device, os.environ.get(VARIABLE, "")
    if wish == "triton":
        return device.type in ("cpu", "cuda")
    if wish == "eager" or device.type != "cuda" or find_spec("triton") is None:
        return False
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # the tensors are fake ones
        return False
    stored_in = stored[0].stored_in if stored else None
    return works(device, any(is_half_precision(bucket.dtype) for bucket in buckets), stored_in, eager)


@functools.cache
def works(device: torch.device, half: bool, stored_in: torch.dtype | None, eager: Step) -> bool:
    """Whether the kernels agree with the eager step; if not, says so once."""
    if reason := reason_not_to_use(device, eager, half=half, stored_in=stored_in):
        warn_user(
            f"the kernels for GPUs are not used on {device}, where {reason}; steps are correct but slower. Please "
            f"report this. {VARIABLE}=eager in the environment turns them off without this warning"
        )
        return False
    return True


@torch.no_grad()
def reason_not_to_use(
    device: torch.device, eager: Step, *, half: bool, stored_in: torch.dtype | None = None
) -> str | None:
    """Try the kernels on a few small tensors; None if they agree with the eager step."""
    from mechanic.torch.gpu import driver

    dtype = torch.bfloat16 if half else torch.float32
    try:
        for make in (torch.optim.AdamW, torch.optim.SGD):  # the second is lent Delta in its first step
            steps = eager, functools.partial(driver.step, eager=eager)
            expected, found = (_try(make, step, device, dtype, stored_in) for step in steps)
            if not all(_agree(*pair, stored_in) for pair in zip(expected, found, strict=True)):
                return "they do not agree with the eager step"
    except Exception as error:  # of a compiler or a driver: it can be anything
        return f"they fail with {type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
    return None


def _try(
    make: Any, step: Step, device: torch.device, dtype: torch.dtype, stored_in: torch.dtype | None
) -> list[tuple[Tensor, bool]]:
    """Three steps; returns what the parameters stand for, the tuner, and Deltas, which come with True.

    With stored Deltas a base may step in bfloat16. Fused, it rounds once, as the kernels do.
    """
    from mechanic.torch.gpu import columns

    sizes = columns.CHUNK + columns.BLOCK + 7, 3
    params = [torch.linspace(-1, 1, size, device=device).to(dtype).requires_grad_() for size in sizes]
    base = make(params, lr=0.1, weight_decay=0.01, fused=True if stored_in else None)
    delta = INT8 if stored_in == torch.int8 else stored_in
    wrapped = Wrapped(base, TunerConfig(), None, False, False, False, None, peak_is_settled=True, delta=delta)
    wrapped.begin()
    for index in range(3):
        for p in params:
            p.grad = torch.cos(p.detach() + index)
        reduction, buckets = wrapped.reduction_and_buckets(wrapped.decays_beside_delta())
        step(wrapped, reduction, buckets)
    kept = [wrapped.base.state[p] for p in params]
    values = [p.detach().float() + state.get(RESIDUAL, 0.0) for p, state in zip(params, kept, strict=True)]
    exact = [*values, wrapped.groups[0]["mechanic_tuner"]]
    deltas = [decoded(state)[DELTA].float() for state in kept]
    return [*((tensor, False) for tensor in exact), *((delta, True) for delta in deltas)]


def _agree(a: tuple[Tensor, bool], b: tuple[Tensor, bool], stored_in: torch.dtype | None) -> bool:
    """Single elements of a stored Delta may be rounded the other way, so there the mean counts."""
    (expected, is_delta), (found, _) = a, b
    distance = (expected - found).abs()
    of_all = distance.mean() if is_delta and stored_in is not None else distance.max()
    return bool(of_all <= TOLERANCE * expected.abs().max())
