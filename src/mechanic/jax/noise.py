"""Random numbers as a function of step, parameter and element: no key is needed, and a resumed run draws them again.

They are those of ``mechanic.torch``: every ROW elements get the numbers from 0 to ROW - 1 in an order that depends on
the step, so their mean is exact. Where in this order a row begins depends on the parameter and on the row. Each number
is worked out from the element's place alone, so shards need nothing of each other.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

ROW = 1 << 15
"""Elements that each get another random number, before these are used again in another order."""

_FRACTIONS = 1 << 14
"""So many different random fractions. Their distance from 0 and 1 is more than the rounding of a code in float32, so a
code that does not change stays as it is."""

_CUT = 1 << 16  # bfloat16 is the upper half of a float32


class Noise(NamedTuple):
    """The random numbers of one parameter in one step."""

    step: jax.Array  # 0-dim
    number: jax.Array  # of the parameter, so that parameters round differently

    def fractions(self, shape: tuple[int, ...]) -> jax.Array:
        """Between 0 and 1, for every element."""
        numbers = self._numbers(shape) >> (ROW.bit_length() - _FRACTIONS.bit_length())
        return (numbers.astype(jnp.float32) + 0.5) / _FRACTIONS

    def low_bits(self, shape: tuple[int, ...]) -> jax.Array:
        """Between 0 and 2^16, for every element."""
        return self._numbers(shape) * (_CUT // ROW) + _CUT // ROW // 2

    def _numbers(self, shape: tuple[int, ...]) -> jax.Array:
        """From 0 to ROW - 1."""
        mask, half = ROW - 1, ROW.bit_length() // 2
        step, element = self.step.astype(jnp.uint32), _places(shape)
        order = element + _mixed(element >> mask.bit_length(), self.number) & mask
        for turn in range(3):  # each of these maps the numbers one to one
            factor, offset = (_mixed(step, 2 * turn + which) & mask for which in (0, 1))
            order = order * (factor | 1) + offset & mask
            order ^= order >> half
        return order


def _places(shape: tuple[int, ...]) -> jax.Array:
    """Which element in the order of rows each one is. Beyond 2^32 elements it begins anew."""
    places = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % (1 << 32)
        places += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return places


def _mixed(number: Any, salt: int | jax.Array) -> Any:
    """A hash of two numbers, 31 bits; in uint32, whose products are right in their lower bits."""
    mask = (1 << 31) - 1
    mixed = (number + jnp.asarray(salt, jnp.uint32) * jnp.uint32(0x2545F491) + jnp.uint32(0x2545F491)) & mask
    for factor in (0x1B873593, 0x2C1B3C6D, 0x297A2D39):
        mixed = ((mixed ^ (mixed >> 15)) * jnp.uint32(factor)) & mask
    return mixed ^ (mixed >> 16)
