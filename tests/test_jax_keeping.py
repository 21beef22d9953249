"""Keeping what was learned: freeze and release."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_task import AROUND, learned, mlp, stepper, train, train_loss
from mechanic.jax import freeze, mechanize, release, scale, scales
from mechanic.tuner import TunerState


@pytest.mark.parametrize(
    ("around", "dtype"), [("nothing", jnp.float32), ("chain", jnp.bfloat16), ("MultiSteps", jnp.float32)]
)
def test_a_frozen_state_goes_on_at_the_learned_scale_without_delta(around, dtype):
    optimizer = AROUND[around](mechanize(optax.sgd(0.1), unit=0.1))
    params, state = train(mlp(hidden=4, dtype=dtype), optimizer, 10)
    frozen = freeze(state)
    saved = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
    delta, tuner = 4 * sum(leaf.size for leaf in jax.tree.leaves(params)), 4 * 5 * len(TunerState._fields)
    assert saved == delta + tuner
    trained, after = train(params, optimizer, 20, state=frozen)
    assert stepper(optimizer)._cache_size() == 2  # one before, one after
    assert scale(after) == scale(state)
    assert train_loss(trained) < train_loss(params)


def test_freezing_is_the_base_at_the_learned_rate():
    optimizer = mechanize(optax.adam(0.1), unit=0.1)
    params, state = learned(optimizer)
    plain, plain_state = release(optax.adam(0.1), state, unit=0.1)
    rate = float(scale(state))
    written_out = optax.adam(rate)
    frozen, _ = train(params, optimizer, 10, state=freeze(state))
    released, _ = train(params, plain, 10, state=plain_state)
    expected, _ = train(params, written_out, 10, state=plain_state)
    for ours, other, leaf in zip(*map(jax.tree.leaves, (frozen, released, expected)), strict=True):
        np.testing.assert_allclose(ours, leaf, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(other, leaf, rtol=1e-3, atol=1e-6)


def test_labels_are_released_each_at_its_own_rate():
    labels = {"first": "a", "last": "b"}
    params, state = learned(mechanize(optax.sgd(1.0), labels=labels))
    plain, plain_state = release(optax.sgd(1.0), state, labels=labels)
    updates, _ = plain.update(params, plain_state, params)
    for part, name in labels.items():
        np.testing.assert_allclose(updates[part], -scales(state)[name] * params[part], rtol=1e-6)


def test_nothing_can_be_kept_before_anything_was_learned():
    state = mechanize(optax.sgd(1.0)).init(jnp.ones(2))
    with pytest.raises(ValueError, match="nothing has been learned yet"):
        freeze(state)
    with pytest.raises(ValueError, match="nothing has been learned yet"):
        release(optax.sgd(1.0), state)
