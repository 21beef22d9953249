"""How the kernels read and write memory: lists of numbers, and parameters in half precision."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
BFLOAT16_EPS = tl.constexpr(0.0078125)


@triton.jit
def _list(record, column: tl.constexpr, start, DTYPE: tl.constexpr):
    return tl.load(record + column).to(tl.pointer_type(DTYPE)) + start


@triton.jit
def _load(p, i, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(p + i, mask, 0.0)
    else:
        # An address from memory is unknown to the compiler: without this it would load one number at a time.
        return tl.load(tl.multiple_of(p + i, 16))


@triton.jit
def _store(p, i, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(p + i, value, mask)
    else:
        tl.store(tl.multiple_of(p + i, 16), value)


# Half precision, as in mechanic.torch.kernels.rounding.


@triton.jit
def _narrow(a, DTYPE: tl.constexpr):
    """Round to nearest even. Triton's interpreter truncates to bfloat16, which devices do not, so it rounds by bits."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = a.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
        a = tl.where(a == a, rounded, a)
    return a.to(DTYPE)


@triton.jit
def _value(x, r, i, mask, XT: tl.constexpr, HALF: tl.constexpr, MASKED: tl.constexpr):
    stored = _load(x, i, mask, MASKED)
    value = stored.to(tl.float32)
    if HALF:
        whole = value + _load(r, i, mask, MASKED).to(tl.float32)
        value = tl.where(_narrow(whole, XT) == stored, whole, value)
    return value


@triton.jit
def _store_value(x, r, i, value, mask, XT: tl.constexpr, HALF: tl.constexpr, MASKED: tl.constexpr):
    if HALF:
        low = _narrow(value, XT)
        wide = low.to(tl.float32)
        rest = _narrow(value - wide, tl.bfloat16)
        seen = _narrow(rest.to(tl.float32) + wide, XT)
        shorter = _narrow(rest.to(tl.float32) * (1 - BFLOAT16_EPS), tl.bfloat16)
        _store(x, i, low, mask, MASKED)
        _store(r, i, tl.where(seen != low, shorter, rest), mask, MASKED)
    else:
        _store(x, i, value, mask, MASKED)
