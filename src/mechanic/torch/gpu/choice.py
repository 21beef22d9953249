"""Whether the kernels are used: on CUDA and ROCm, if Triton is there and they agree with the eager ones."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from mechanic.torch.buckets import Bucket

VARIABLE = "MECHANIC_KERNELS"
"""``eager`` turns the kernels off. ``triton`` uses them on every device, CPUs included, as Triton's interpreter can."""


def takes(buckets: list[Bucket]) -> bool:
    """Whether the kernels are to make a step on these parameters."""
    if not buckets:
        return False
    device, wish = buckets[0].device, os.environ.get(VARIABLE, "")
    if wish == "triton":
        return device.type in ("cpu", "cuda")
    return wish != "eager" and device.type == "cuda" and _works_on(device)


def _works_on(device: torch.device) -> bool:
    return find_spec("triton") is not None
