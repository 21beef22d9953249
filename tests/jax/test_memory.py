"""What Mechanic costs in memory beyond the base: one number per parameter that stays, and one while it steps."""

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks.speed import jax_step
from mechanic.jax import freeze, mechanize, release
from tests.jax.task import learned

SIDE = 100


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_one_number_per_parameter_stays_and_one_comes_and_goes():
    bare, ours = (jax_step.cost_of(jax_step.build(name, side=SIDE)) for name in ("adamw", "mechanic"))
    assert ours.state == pytest.approx(bare.state + 4, abs=0.01)
    assert ours.temporary < 4.5


@pytest.mark.parametrize(("delta", "kept", "temporary"), [("bfloat16", 2, 6.5), ("int8", 1.05, 6.5)])
def test_a_delta_in_fewer_bytes_keeps_so_many(delta, kept, temporary):
    bare, ours = (jax_step.cost_of(jax_step.build(name, side=SIDE)) for name in ("adamw", f"mechanic, delta={delta}"))
    assert ours.state <= bare.state + kept + 0.01
    assert ours.temporary < temporary


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", 4 + 2), ("float16", 4 + 2), ("float32", 4), ("complex64", 8)]
)
def test_so_many_bytes_per_parameter_stay(dtype, expected):
    """Delta in at least float32, and a residual of two bytes in half precision. SGD alone keeps nothing."""
    params = jnp.ones((SIDE, SIDE), dtype)
    state = mechanize(optax.sgd(1.0)).init(params)
    assert bytes_of(state) / params.size == pytest.approx(expected, abs=0.05)


def test_frozen_or_released_nothing_of_it_stays():
    params, state = learned(mechanize(optax.adam(1.0)))
    scale_peak_and_count = 3 * 4
    assert bytes_of(freeze(state)) == bytes_of(state.base) + scale_peak_and_count
    assert bytes_of(release(optax.adam(1.0), state)[1]) == bytes_of(optax.adam(1.0).init(params))
