"""Kernels for GPUs, in Triton: a step of a few launches over a table of addresses.

All but the choice is imported when it is first needed.
"""

from __future__ import annotations

from typing import Any

from mechanic.torch.buckets import Bucket
from mechanic.torch.gpu.choice import Step, takes
from mechanic.torch.shards import Reduction
from mechanic.torch.wrapped import Wrapped

__all__ = ["observe", "step", "takes"]


def step(wrapped: Wrapped[Any], reduction: Reduction, buckets: list[Bucket], eager: Step) -> None:
    """See :func:`mechanic.torch.step.step`; ``eager`` makes a step that the kernels cannot make."""
    from mechanic.torch.gpu import driver

    driver.step(wrapped, reduction, buckets, eager)


def observe(wrapped: Wrapped[Any], buckets: list[Bucket]) -> None:
    """See :func:`mechanic.torch.step.observe`."""
    from mechanic.torch.gpu import driver

    driver.observe(wrapped, buckets)
