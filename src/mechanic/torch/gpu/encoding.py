"""Delta in fewer bytes, decoded and encoded in registers: as in :mod:`mechanic.torch.kernels.storage`, code for code.

The names are those of that module. Whoever changes one changes the other; ``tests/torch/triton`` compares them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic.torch.gpu.access import _load, _store
from mechanic.torch.kernels import storage

SHARING = tl.constexpr(storage.BLOCK)  # elements that share a scale
LARGEST_CODE = tl.constexpr(storage.LARGEST_CODE)
SMALLEST_SCALE = tl.constexpr(storage.SMALLEST_SCALE)
ROW = tl.constexpr(storage.ROW)
LAST = tl.constexpr(storage.ROW - 1)
HALF_OF_BITS = tl.constexpr(storage.ROW.bit_length() // 2)


@triton.jit
def _mixed(number, salt):
    """A hash of two numbers, 31 bits; in uint32, whose products are right in their lower bits."""
    mixed = (number + ((0x2545F491 * (salt + 1)) & 0x7FFFFFFF)) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x1B873593) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x297A2D39) & 0x7FFFFFFF
    return mixed ^ (mixed >> 16)


@triton.jit
def _random(start, o, i, place, steps):
    """From 0 to ROW - 1, for the elements ``start + o + i`` of a tensor, which are in one row."""
    first = ((start % ROW).to(tl.uint32) + o).to(tl.uint32)
    row = (start // ROW).to(tl.uint32) + first // ROW
    order = (first + _mixed(row, place) + i.to(tl.uint32)) & LAST
    for turn in tl.static_range(3):
        factor = (_mixed(steps, 2 * turn) & LAST) | 1
        order = (order * factor + (_mixed(steps, 2 * turn + 1) & LAST)) & LAST
        order = order ^ (order >> HALF_OF_BITS)
    return order


@triton.jit
def _spread(of_blocks, N: tl.constexpr):
    """What elements share, for every element."""
    return tl.reshape(tl.broadcast_to(of_blocks[:, None], [N // SHARING, SHARING]), [N])


@triton.jit
def _load_delta(d, scales, o, mask, limit, N: tl.constexpr, DT: tl.constexpr, MASKED: tl.constexpr):
    """N elements from ``o`` on, in float32; 0 from ``limit`` on. Blocks with masks have one scale."""
    c = _load(d, o + tl.arange(0, N), mask, MASKED).to(tl.float32)
    if DT == tl.int8:
        block = o // SHARING + tl.arange(0, N // SHARING)
        if MASKED:
            scale = tl.load(scales + block, block * SHARING < limit, 0.0)
        else:
            scale = tl.load(scales + block)
        root = c * (1 / LARGEST_CODE)
        c = root * tl.abs(root) * _spread(scale, N)
    return c


@triton.jit
def _store_rounded(
    d, scales, o, c, mask, start, place, steps, N: tl.constexpr, DT: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Round stochastically into fewer bytes. ``start`` is the element that ``o`` counts from."""
    i = tl.arange(0, N)
    if DT == tl.bfloat16:
        low_bits = (_random(start, o, i, place, steps) << 1) | 1
        bits = c.to(tl.uint32, bitcast=True) + low_bits
        cut = (bits & 0xFFFF0000).to(tl.uint32).to(tl.float32, bitcast=True)
        _store(d, o + i, cut.to(tl.bfloat16), mask, MASKED)
    else:
        # As integers NaN is the largest, so that it reaches the scale.
        magnitude = c.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(tl.reshape(magnitude, [N // SHARING, SHARING]), 1).to(tl.float32, bitcast=True)
        divisor = tl.where(largest < SMALLEST_SCALE, SMALLEST_SCALE, largest)
        factor = tl.div_rn(tl.full([N // SHARING], LARGEST_CODE * LARGEST_CODE, tl.float32), divisor)
        square = tl.abs(c) * _spread(factor, N)
        fraction = ((_random(start, o, i, place, steps) >> 1).to(tl.float32) + 0.5) * (2 / ROW)
        whole = tl.floor(tl.sqrt(square))
        gap = 2 * whole + 1  # to the square of the next whole number
        code = whole + tl.where(square + gap * fraction >= whole * whole + gap, 1.0, 0.0)
        _store(d, o + i, tl.where(c < 0, -code, code).to(tl.int8), mask, MASKED)
        tl.store(scales + o // SHARING + tl.arange(0, N // SHARING), tl.where(largest == 0, largest, divisor))
