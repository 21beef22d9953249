"""What Delta is stored in: its parameter's dtype, float32, bfloat16, or int8 with a scale for every block.

Rounding is stochastic: a number between two that can be stored becomes the upper or the lower one, with probabilities
that make the mean right. Rounding to nearest would lose for good what a step adds below the last bit. Loading a
checkpoint rounds to nearest, so that what was stored before comes back bit for bit.

In int8 a block of :data:`BLOCK` elements keeps the magnitude of its largest element, m, and for every element a code c
from -127 to 127 that stands for sign(c) (c / 127)^2 m. The square puts half of the codes below a quarter of m.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

RESIDUAL_DTYPE = torch.bfloat16
"""Of what rounding cuts off a half-precision parameter: two bytes with the range of float32, eight more bits."""

BLOCK = 256
"""Elements that share a scale: 4 bytes in 256 are 1.6 % of the memory."""

LARGEST_CODE = 127

SMALLEST_SCALE = 1e-30
"""Below it 1 / scale would overflow. Elements smaller than about 1e-34 become 0 or 6e-35."""

ROW = 1 << 15
"""Elements that each get another random number, before these are used again in another order. A multiple of BLOCK."""

_FRACTIONS = 1 << 14
"""So many different random fractions. Their distance from 0 and 1 is more than the rounding of a code in float32, so a
code that does not change stays as it is."""

CUT = 1 << 16
"""bfloat16 is the upper half of a float32."""


class Stored(NamedTuple):
    """The Delta of one tensor, or of a part of it that begins at a multiple of ROW."""

    codes: Tensor  # int8, bfloat16, or Delta itself
    scales: Tensor | None = None  # [blocks], of int8
    number: int = 0  # of the tensor, so that tensors round differently
    first: int = 0  # which element of the tensor the codes begin with

    def part(self, codes: Tensor, first: int) -> Stored:
        """Some of the codes, from the element ``first`` on, which is a multiple of ROW."""
        scales = None if self.scales is None else self.scales[first // BLOCK : blocks_in(first + codes.numel())]
        return Stored(codes, scales, self.number, self.first + first)


def blocks_in(elements: int) -> int:
    return -(-elements // BLOCK)


class Noise:
    """Random numbers as a function of step, tensor and element. torch's generators are not used.

    Every ROW elements get the numbers from 0 to ROW - 1 in an order that depends on the step, so their mean is exact.
    Where in this order a row begins depends on the tensor and on the row. A ``step`` on the device is not waited for.
    """

    def __init__(self, step: int | Tensor, device: torch.device) -> None:
        self._step, self._device = step, device

    def fractions(self, stored: Stored) -> Tensor:
        """Between 0 and 1, for every element."""
        return _rows(self._all_fractions, stored)

    def low_bits(self, stored: Stored) -> Tensor:
        """Between 0 and 2^16, for every element."""
        return _rows(self._all_low_bits, stored)

    @cached_property
    def _all_fractions(self) -> Tensor:
        numbers = self._order().bitwise_right_shift(ROW.bit_length() - _FRACTIONS.bit_length())
        return numbers.to(torch.float32).add_(0.5).div_(_FRACTIONS).repeat(2)

    @cached_property
    def _all_low_bits(self) -> Tensor:
        return self._order().mul(CUT // ROW).add_(CUT // ROW // 2).repeat(2)

    def _order(self) -> Tensor:
        """The numbers from 0 to ROW - 1 in the order of the step, int32."""
        step = torch.as_tensor(self._step, dtype=torch.int64, device=self._device)
        mask, half = ROW - 1, ROW.bit_length() // 2
        order = torch.arange(ROW, dtype=torch.int32, device=self._device)
        for turn in range(3):  # each of these maps the numbers one to one
            factor, offset = (_mixed(step, 2 * turn + which) & mask for which in (0, 1))
            order = order.mul_(factor | 1).add_(offset).bitwise_and_(mask)
            order = order.bitwise_xor_(order >> half)
        return order


def _rows(twice: Tensor, stored: Stored) -> Tensor:
    count, first = stored.codes.numel(), stored.first // ROW
    starts = [_mixed(row, stored.number) & (ROW - 1) for row in range(first, first + -(-count // ROW))]
    if len(starts) == 1:
        return twice[starts[0] : starts[0] + count]
    return torch.cat([twice[start : start + ROW] for start in starts])[:count]


def _mixed(number: Any, salt: int) -> Any:
    """A hash of two numbers, 31 bits; of a tensor the same as of an int."""
    mask = (1 << 31) - 1
    mixed = (number + 0x2545F491 * (salt + 1)) & mask
    for factor in (0x1B873593, 0x2C1B3C6D, 0x297A2D39):
        mixed = ((mixed ^ (mixed >> 15)) * factor) & mask
    return mixed ^ (mixed >> 16)


def decode(stored: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values in a dtype that is at least float32, in the order of the codes; Delta itself if it is kept so."""
    if stored.scales is None:
        return stored.codes.to(dtype)
    values = torch.empty_like(stored.codes, dtype=torch.float32)
    flat = flat_of(values)
    flat.copy_(flat_of(stored.codes)).mul_(1 / LARGEST_CODE)
    flat.mul_(flat.abs())
    for blocks, scales in _blocks(flat, stored.scales):
        blocks.mul_(scales.unsqueeze(1))
    return values.to(dtype)


def encode(values: Tensor, stored: Stored, noise: Noise | None = None) -> None:
    """Round into the codes: stochastically, or to nearest without ``noise``.

    Of values that are not finite, int8 keeps the scale of their block so, and the whole block is not finite then.
    """
    codes = flat_of(stored.codes)
    if not codes.numel():
        return
    if values.dtype != torch.float32 or values.stride() != stored.codes.stride():
        values = torch.empty_like(stored.codes, dtype=torch.float32).copy_(values)
    flat = flat_of(values)
    if stored.scales is not None:
        _encode_blocks(flat, codes, stored.scales, None if noise is None else noise.fractions(stored))
    elif codes.dtype == torch.bfloat16 and noise is not None:
        bits = flat.view(torch.int32) + noise.low_bits(stored)
        codes.copy_(bits.bitwise_and_(-CUT).view(torch.float32))
    else:
        codes.copy_(flat)


def _encode_blocks(values: Tensor, codes: Tensor, scales: Tensor, fractions: Tensor | None) -> None:
    squares = values.abs()  # of codes that are not whole numbers yet
    new_scales = torch.empty_like(scales)
    for blocks, found in _blocks(squares, new_scales):
        largest = blocks.amax(1)
        divisor = largest.clamp_min(SMALLEST_SCALE)
        found.copy_(torch.where(largest == 0, largest, divisor))
        blocks.mul_((LARGEST_CODE**2 / divisor).unsqueeze(1))
    # The squares of whole numbers q and q + 1 are 2 q + 1 apart. A square v between them, with a random fraction of
    # this gap added, reaches the upper one with the probability (v - q^2) / (2 q + 1), which makes its mean v.
    whole = squares.sqrt().floor_()
    if fractions is None:
        squares.add_(whole).add_(0.5)
    else:
        squares.addcmul_(whole, fractions, value=2).add_(fractions)
    codes.copy_(squares.sqrt_().copysign_(values))  # which cuts off what follows the point
    scales.copy_(new_scales)


def _blocks(flat: Tensor, scales: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Full blocks and their scales, [blocks, BLOCK] and [blocks]; then the last one, if it is shorter."""
    full = len(flat) // BLOCK
    cut = full * BLOCK
    parts = (flat[:cut].view(full, BLOCK), scales[:full]), (flat[cut:].unsqueeze(0), scales[full:])
    return [part for part in parts if part[0].numel()]


def flat_of(tensor: Tensor) -> Tensor:
    """The elements in the order of memory. Codes have no gaps between them: ``zeros_like`` made them."""
    return tensor.as_strided((tensor.numel(),), (1,))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32: half precision cannot hold a sum of small steps."""
    return _WIDER.get(dtype, dtype)


_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.complex32: torch.complex64}


def dtype_of_delta(dtype: torch.dtype, delta: torch.dtype | str | None) -> torch.dtype:
    """What Delta of a parameter is stored in. That of complex parameters is always in their working dtype."""
    working = working_dtype(dtype)
    if dtype.is_complex:
        return working
    if delta is None:
        return working if dtype == working else torch.bfloat16
    chosen = torch.int8 if isinstance(delta, str) else delta
    return chosen if chosen.itemsize < working.itemsize else working
