"""What a checkpoint of the state holds, and states restored as other arrays. test_resume.py has whole runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import freeze, learned_rates, mechanize, nonfinite_steps, scale, scales
from mechanic.tuner import TunerState
from tests.jax.task import LABELS, PLAIN, assert_close, avals, learned, mlp, mover, same_bits, train


def keys(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def test_a_checkpoint_holds_these_keys_and_plain_dtypes():
    """Orbax and Flax save by key, so renaming one breaks saved runs."""
    state = mechanize(optax.adamw(1.0), labels=LABELS).init(mlp(hidden=4))
    state = optax.tree.set(state, scale={"a": jnp.float32(1.0), "b": jnp.float32(1.0)})
    tuner = [f".tuner.{name}" for name in TunerState._fields]
    deltas, ends = [".delta['first']", ".delta['last']"], [".peak_lr", ".count"]
    of_base = [f".base{key}" for key in keys(optax.adamw(1.0).init(mlp(hidden=4)))]
    assert keys(state) == [".scale['a']", ".scale['b']", *deltas, *tuner, *of_base, *ends]
    assert keys(freeze(state)) == [".scale['a']", ".scale['b']", *of_base, *ends]
    half = PLAIN.init(mlp(hidden=4, dtype=jnp.bfloat16))
    residuals = [".residual['first']", ".residual['last']"]
    assert keys(half) == [".scale['default']", *deltas, *residuals, *tuner, *ends]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


@pytest.mark.parametrize(
    "jit", [jax.jit, pytest.param(lambda update: update, marks=pytest.mark.long)], ids=["jitted", "eager"]
)
def test_a_state_of_numpy_arrays_goes_on(jit):
    """As some checkpoints come back."""
    params, state = learned(PLAIN, steps=3)
    as_numpy = jax.tree.map(np.asarray, (params, state))
    assert scales(as_numpy[1]) == scales(state)
    assert nonfinite_steps(as_numpy[1]) == {"default": 0}
    ours, expected = (jit(PLAIN.update)(params, state, params) for params, state in (as_numpy, (params, state)))
    assert_close(ours, expected, rtol=0)


def test_a_state_pickled_before_the_learned_rate_was_a_mean_goes_on():
    params, state = learned(PLAIN, steps=3)
    former = state._replace(tuner=TunerState(*state.tuner[:-2]))  # what unpickling makes of its twelve fields
    assert learned_rates(former) == learned_rates(state) == scales(state)
    expected, ours = (jax.jit(PLAIN.update)(params, each, params) for each in (state, former))
    assert same_bits(ours, expected)


@pytest.mark.long
def test_a_state_saved_without_x64_goes_on_with_it():
    """The tuner stays in float32; S follows the run that never changed."""
    optimizer = mechanize(optax.adamw(1.0))
    params, state = learned(optimizer, steps=10)
    _, expected = train(params, optimizer, 5, state=state, first=10)
    with jax.enable_x64(True):
        moved, after = train(params, mechanize(optax.adamw(1.0)), 5, state=state, first=10)
    assert avals((moved, after)) == avals((params, state))
    assert scale(after) == pytest.approx(float(scale(expected)), rel=1e-3)


def test_a_restored_scale_is_read_by_name_and_counts():
    """S in a checkpoint decides how the run goes on: half of it moves the parameters back towards their start."""
    params, state = learned(PLAIN, steps=10)
    halved = optax.tree.set(state, scale={"default": scale(state) / 2})
    assert same_bits(scales(halved), {"default": scale(state) / 2})
    moved, _ = mover(PLAIN)(jax.tree.map(jnp.zeros_like, params), halved, params)
    for name, p in params.items():
        expected = (scale(state) - scale(halved)) * np.asarray(state.delta[name])
        np.testing.assert_allclose(moved[name] - p, expected, rtol=1e-4, atol=1e-7)
