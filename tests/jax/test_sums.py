"""The sums that the tuner learns from, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mechanic.jax.sums import measure
from mechanic.tuner import SUMS


def arrays(shape, dtype=np.float32, count=4):
    rng = np.random.default_rng(0)
    values = [rng.normal(1.0, 1.0, shape) for _ in range(count)]
    if np.dtype(dtype).kind == "c":
        values = [value + 1j * rng.normal(size=shape) for value in values]
    return [np.asarray(value, dtype) for value in values]


def expected_sums(x, g, delta, *others):
    x, g, delta, *others = (np.asarray(a, np.complex128).ravel() for a in (x, g, delta, *others))
    pairs = [(delta, g), (delta, x), (g, g), (x, x), (delta, delta), *((other, other) for other in others)]
    return [np.vdot(a, b).real for a, b in pairs]


def sums_of(x, g, delta, *others, rows=None, tuners=1):
    """Of lists of leaves."""
    rows = rows or [0] * len(x)
    run = functools.partial(measure, rows=rows, tuners=tuners, dtype=jnp.float32, axis_name=None)
    return np.asarray(jax.jit(run)(x, g, delta, *(others or [[]])))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (257,), (63, 65), (1 << 20,), (1_000_003,)])
def test_every_size_is_summed_to_float32(shape):
    x, g, delta, other = arrays(shape)
    np.testing.assert_allclose(sums_of([x], [g], [delta])[0], expected_sums(x, g, delta), rtol=3e-6)
    six = sums_of([x], [g], [delta], [other])[0]
    np.testing.assert_allclose(six, expected_sums(x, g, delta, other), rtol=3e-6)


@pytest.mark.long
def test_a_long_sum_keeps_its_digits():
    """Added up one after the other, ones stop counting at 2^24."""
    x = jnp.ones((1 << 24) + (1 << 22))
    assert sums_of([x], [x], [x])[0, SUMS.index("param_sq")] == x.size


def test_complex_numbers_count_as_pairs_of_real_ones():
    x, g, delta, _ = arrays((31, 7), np.complex64)
    np.testing.assert_allclose(sums_of([x], [g], [delta])[0], expected_sums(x, g, delta), rtol=3e-6)


def test_every_tuner_has_its_own_leaves():
    first, second, third = (arrays(shape, count=3) for shape in ((5, 4), (300,), ()))
    lists = [list(leaves) for leaves in zip(first, second, third, strict=True)]
    found = sums_of(*lists, rows=[1, 0, 1], tuners=3)
    together = np.add(expected_sums(*first), expected_sums(*third))
    np.testing.assert_allclose(found[:2], [expected_sums(*second), together], rtol=3e-6)
    assert not found[2].any()
