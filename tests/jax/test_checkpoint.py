"""What a checkpoint of the state holds, and states restored as other arrays. test_jax_resume.py has whole runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import freeze, mechanize, nonfinite_steps, scale, scales
from mechanic.tuner import TunerState
from tests.jax.task import PLAIN, learned, mlp, same_bits, train


def keys(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def test_a_checkpoint_holds_these_keys():
    """Orbax and Flax save by key, so renaming one breaks saved runs."""
    _, state = learned(mechanize(optax.sgd(1.0), labels={"first": "a", "last": "b"}), steps=3)
    tuner = [f".tuner.{name}" for name in TunerState._fields]
    deltas = [".delta['first']", ".delta['last']"]
    assert keys(state) == [".scale['a']", ".scale['b']", *deltas, *tuner, ".peak_lr", ".count"]
    assert keys(freeze(state)) == [".scale['a']", ".scale['b']", ".peak_lr", ".count"]
    half = mechanize(optax.sgd(1.0)).init(mlp(dtype=jnp.bfloat16))
    residuals = [".residual['first']", ".residual['last']"]
    assert keys(half) == [".scale['default']", *deltas, *residuals, *tuner, ".peak_lr", ".count"]


def test_a_checkpoint_holds_arrays_of_plain_dtypes():
    _, state = learned(mechanize(optax.adamw(1.0)), steps=3)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


@pytest.mark.parametrize("jit", [jax.jit, lambda update: update], ids=["jitted", "eager"])
def test_a_state_of_numpy_arrays_goes_on(jit):
    """As some checkpoints come back."""
    params, state = learned(PLAIN, steps=3)
    as_numpy = jax.tree.map(np.asarray, (params, state))
    assert scales(as_numpy[1]) == scales(state)
    assert nonfinite_steps(as_numpy[1]) == {"default": 0}
    ours, expected = (jit(PLAIN.update)(params, state, params) for params, state in (as_numpy, (params, state)))
    for one, other in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_state_saved_without_x64_goes_on_with_it():
    """The tuner stays in float32; S follows the run that never changed."""
    optimizer = mechanize(optax.adamw(1.0))
    params, state = train(mlp(hidden=4), optimizer, 10)
    _, expected = train(params, optimizer, 5, state=state, first=10)
    with jax.enable_x64(True):
        other = mechanize(optax.adamw(1.0))
        moved, after = train(params, other, 5, state=state, first=10)
    assert jax.tree.map(lambda leaf: leaf.dtype, (moved, after)) == jax.tree.map(
        lambda leaf: leaf.dtype, (params, state)
    )
    assert scale(after) == pytest.approx(float(scale(expected)), rel=1e-3)


def test_a_restored_scale_is_read_by_name_and_counts():
    """S in a checkpoint decides how the run goes on: half of it moves the parameters back towards their start."""
    params, state = learned(PLAIN, steps=10)
    halved = optax.tree.set(state, scale={"default": scale(state) / 2})
    assert same_bits(scales(halved), {"default": scale(state) / 2})
    updates, _ = jax.jit(PLAIN.update)(jax.tree.map(jnp.zeros_like, params), halved, params)
    for name, update in updates.items():
        expected = (scale(state) - scale(halved)) * np.asarray(state.delta[name])
        np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-7)
