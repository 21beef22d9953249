"""The dtypes that things are kept in, and half-precision parameters.

A half-precision parameter carries a residual: what rounding cut off. Steps smaller than its last bit then add up
instead of being lost.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

RESIDUAL_DTYPE = torch.bfloat16
"""Two bytes with the range of float32: eight more bits below the last one of a half-precision parameter."""


def tuner_dtype(device: torch.device) -> torch.dtype:
    """float64 if the device has it: 1 - 0.999999 leaves one digit of a float32."""
    return torch.float64 if _has_float64(device) else torch.float32


@functools.cache
def _has_float64(device: torch.device) -> bool:
    if device.type == "xpu":  # Intel's data-centre GPUs have it, Arc does not
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


@functools.cache
def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32, for Delta and the values a base steps on: half precision cannot hold a sum of small steps."""
    return torch.promote_types(dtype, torch.float32)


def is_half_precision(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def values_of(params: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
    """The values that half-precision parameters stand for, in float32: what is stored plus what rounding cut off."""
    values = []
    for p, residual in zip(params, residuals, strict=True):
        value = residual.to(torch.float32).add_(p)
        # If the sum rounds to something else, somebody has written to the parameter since. Then p is the value.
        values.append(torch.where(value.to(p.dtype) == p, value, p.to(torch.float32)))
    return values


def store_rounded(values: list[Tensor], params: list[Tensor], residuals: list[Tensor]) -> None:
    """Round float32 values into half-precision parameters and keep what that cuts off. ``values`` is overwritten."""
    for value, p, residual in zip(values, params, residuals, strict=True):
        p.copy_(value)
        residual.copy_(value.sub_(p))
        # A residual rounded up to half of the parameter's last bit would look like somebody's write.
        ambiguous = value.copy_(residual).add_(p).to(p.dtype) != p
        residual.copy_(torch.where(ambiguous, residual * (1 - torch.finfo(RESIDUAL_DTYPE).eps), residual))
