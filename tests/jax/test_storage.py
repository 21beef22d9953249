"""Delta in bfloat16 and int8: what comes back from it, and that it is rounded as in mechanic.torch.

So what tests/torch/test_storage.py has of means and random numbers holds here as well.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mechanic.jax.noise import ROW, Noise
from mechanic.jax.storage import BLOCK, block_of, decode, encode
from mechanic.torch import delta as theirs

SHAPES = [(), (0, 3), (1,), (BLOCK,), (BLOCK + 1,), (5, 257), (64, 10), (2, 3, 4, 5), (3, 3, 17, 15), (ROW + 7,)]
both = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8], ids=["bfloat16", "int8"])


def noise(step=0, number=0):
    return Noise(jnp.asarray(step, jnp.int32), number)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def through(dtype, values, step):
    return decode(*encode(values, dtype, None if step is None else Noise(step, 0)), jnp.float32)


def stored(dtype, values, step=None):
    """What comes back of values; without a step they are rounded to nearest."""
    return np.asarray(through(dtype, values, step))


def gap(dtype, values):
    """The distance between the two numbers that can be stored around each value."""
    if dtype == jnp.bfloat16:
        with np.errstate(divide="ignore"):
            return np.exp2(np.floor(np.log2(np.abs(values))) - 7)
    largest = np.zeros_like(values)
    block = block_of(values.shape)
    for place in np.ndindex(*(-(-n // size) for n, size in zip(values.shape, block, strict=True))):
        part = tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, block, strict=True))
        largest[part] = np.abs(values[part]).max(initial=0)
    code = np.floor(127 * np.sqrt(np.abs(values) / largest))
    return (2 * code + 1) / 127**2 * largest


@both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_come_back_within_a_gap_and_to_nearest_within_half(dtype, shape):
    values = normal(*shape)
    error = [np.abs(stored(dtype, values, step) - values) / gap(dtype, values) for step in (0, 1, None)]
    assert all((part <= 1.001).all() for part in error)
    assert (error[-1] <= 0.501).all()


@pytest.mark.parametrize(
    "shape", [(1000, 1000), (9, 129), (3, 86), (4, 65), (257,), (64, 3, 3, 3), (999, 10), (7, 11, 13, 2)]
)
def test_int8_takes_at_most_1_05_bytes_per_element(shape):
    codes, scales = jax.eval_shape(lambda: encode(jnp.zeros(shape), jnp.int8, noise()))
    assert math.prod(block_of(shape)) <= BLOCK
    assert codes.shape == shape
    assert scales.ndim == codes.ndim
    assert codes.dtype == jnp.int8
    assert codes.size + scales.size * scales.dtype.itemsize <= 1.05 * math.prod(shape)


@pytest.mark.long
@both
def test_what_was_stored_comes_back_bit_for_bit(dtype):
    values = normal(4, ROW // 2) * np.exp(4 * normal(4, ROW // 2, seed=2))
    kept = encode(jnp.asarray(values), dtype, noise())
    for again in (None, noise(5)):
        for one, other in zip(kept, encode(decode(*kept, jnp.float32), dtype, again), strict=True):
            np.testing.assert_array_equal(one, other)


@both
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(dtype):
    values = np.concatenate([np.zeros(BLOCK), normal(BLOCK), np.zeros(BLOCK)]).astype(np.float32)
    for step in (None, 0, 1):
        np.testing.assert_array_equal(stored(dtype, values, step)[values == 0], 0)
        for bad in (np.inf, -np.inf, np.nan):
            spoilt = values.copy()
            spoilt[BLOCK + 5] = bad
            finite = np.isfinite(stored(dtype, spoilt, step))
            assert not finite[BLOCK + 5]
            assert finite[:BLOCK].all()
            assert finite[2 * BLOCK :].all()


@both
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-20, 1e20, 3e38])
def test_tiny_and_huge_values(dtype, size):
    values = (np.linspace(-1, 1, 500) * size).astype(np.float32)
    for step in (None, 0):
        found = stored(dtype, values, step).astype(float)
        least = 1e-37 if dtype == jnp.bfloat16 else 1e-30 / 127**2  # below it a value is rounded to this or to 0
        assert (np.abs(found - values) <= np.abs(values.astype(float)).max() / 60 + least).all()


@pytest.mark.long
@pytest.mark.parametrize("step", [0, 1, 12345, 2_000_000_000])
@pytest.mark.parametrize("number", [0, 7, 3 << 20])
def test_random_numbers_are_those_of_mechanic_torch(step, number):
    place = theirs.Stored(torch.zeros(2 * ROW + 100), None, number)
    for name in ("fractions", "low_bits"):
        expected = getattr(theirs.Noise(step, torch.device("cpu")), name)(place).numpy()
        ours = np.asarray(getattr(noise(step, number), name)((2 * ROW + 100,)))
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.long
@both
@pytest.mark.parametrize("shape", [(100,), (16, 512), (64, 64), (2, 3, 256)], ids=str)
def test_blocks_that_fill_the_axes_are_rounded_as_in_mechanic_torch(dtype, shape):
    values, elements = normal(*shape), math.prod(shape)
    codes = torch.zeros(shape, dtype=torch.int8 if dtype == jnp.int8 else torch.bfloat16)
    scales = torch.zeros(theirs.blocks_in(elements)) if dtype == jnp.int8 else None
    for step in (None, 3):
        drawn = None if step is None else theirs.Noise(step, torch.device("cpu"))
        theirs.encode(torch.from_numpy(values), theirs.Stored(codes, scales, 5), drawn)
        kept = encode(jnp.asarray(values), dtype, None if step is None else noise(step, 5))
        np.testing.assert_array_equal(np.asarray(kept[0], np.float32), codes.float().numpy())
        if scales is not None:
            np.testing.assert_array_equal(np.ravel(kept[1]), scales.numpy())
