"""What Mechanic costs in memory beyond the base: one number per parameter that stays, and one while it steps."""

import jax
import jax.numpy as jnp
import optax
import pytest

from mechanic.jax import freeze, mechanize, release
from tests.jax.task import cost_of, learned

SIDE = 100


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.long
@pytest.mark.parametrize(
    ("delta", "least", "most", "temporary"),
    [("", 3.99, 4.01, 4.5), (", delta=bfloat16", 1.99, 2.01, 6.5), (", delta=int8", 1.0, 1.06, 6.5)],
)
def test_a_number_per_parameter_stays_in_the_bytes_of_its_storage_and_one_comes_and_goes(delta, least, most, temporary):
    bare, ours = cost_of("adamw"), cost_of(f"mechanic{delta}")
    assert least <= ours.state - bare.state <= most
    assert ours.temporary < temporary


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", 4 + 2), ("float16", 4 + 2), ("float32", 4), ("complex64", 8)]
)
def test_so_many_bytes_per_parameter_stay(dtype, expected):
    """Delta in at least float32, and a residual of two bytes in half precision. SGD alone keeps nothing."""
    params = jnp.ones((SIDE, SIDE), dtype)
    state = mechanize(optax.sgd(1.0)).init(params)
    assert bytes_of(state) / params.size == pytest.approx(expected, abs=0.05)


@pytest.mark.long
def test_frozen_or_released_nothing_of_it_stays():
    params, state = learned(mechanize(optax.adam(1.0)), steps=5)
    scale_peak_and_count = 3 * 4
    assert bytes_of(freeze(state)) == bytes_of(state.base) + scale_peak_and_count
    assert bytes_of(release(optax.adam(1.0), state)[1]) == bytes_of(optax.adam(1.0).init(params))
