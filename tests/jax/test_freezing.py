"""Freeze the scale, or return to the base optimizer at what was learned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import freeze, mechanize, release, scale, scales
from mechanic.tuner import TunerState
from tests.jax.task import AROUND, learned, mlp, stepper, train, train_loss


@pytest.mark.parametrize(
    ("around", "dtype"), [("nothing", jnp.float32), ("chain", jnp.bfloat16), ("MultiSteps", jnp.float32)]
)
def test_a_frozen_state_goes_on_at_the_learned_scale_without_delta(around, dtype):
    optimizer = AROUND[around](mechanize(optax.sgd(0.1), peak_lr=0.1))
    params, state = train(mlp(hidden=4, dtype=dtype), optimizer, 10)
    frozen = freeze(state)
    saved = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
    delta, tuner = 4 * sum(leaf.size for leaf in jax.tree.leaves(params)), 4 * 5 * len(TunerState._fields)
    assert saved == delta + tuner
    trained, after = train(params, optimizer, 20, state=frozen)
    assert stepper(optimizer)._cache_size() == 2  # one before, one after
    assert scale(after) == scale(state)
    assert train_loss(trained) < train_loss(params)


@pytest.mark.parametrize("lr", [1.0, 0.1, 1e-3])
def test_freezing_and_releasing_are_the_base_at_the_learned_rate(lr):
    """Whatever learning rate the base has: the state knows its peak."""
    optimizer = mechanize(optax.adam(lr), peak_lr=lr)
    params, state = learned(optimizer)
    plain, plain_state = release(optax.adam(lr), state)
    written_out = optax.adam(float(scale(state)))
    frozen, _ = train(params, optimizer, 10, state=freeze(state))
    released, _ = train(params, plain, 10, state=plain_state)
    expected, _ = train(params, written_out, 10, state=plain_state)
    assert train_loss(expected) < 0.97 * train_loss(params)  # that there is something to compare
    for ours, other, leaf in zip(*map(jax.tree.leaves, (frozen, released, expected)), strict=True):
        np.testing.assert_allclose(ours, leaf, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(other, leaf, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("around", AROUND)
def test_the_peak_is_kept_through_what_stands_around_and_through_freezing(around):
    optimizer = AROUND[around](mechanize(optax.sgd(1e-3), peak_lr=1e-3))
    params, state = learned(optimizer, steps=3)
    for each in (state, freeze(state)):
        plain, plain_state = release(optax.sgd(1e-3), each)
        updates, _ = jax.jit(plain.update)(params, plain_state, params)
        for update, p in zip(*map(jax.tree.leaves, (updates, params)), strict=True):
            np.testing.assert_allclose(update, -scale(state) * p, rtol=1e-6)


def test_a_peak_that_is_injected_is_the_one_in_the_state():
    optimizer = optax.inject_hyperparams(mechanize)(optax.sgd(0.5), peak_lr=0.5)
    params, state = learned(optimizer, steps=3)
    plain, plain_state = release(optax.sgd(0.5), state)
    updates, _ = plain.update(params, plain_state, params)
    np.testing.assert_allclose(updates["last"], -scale(state) * params["last"], rtol=1e-6)


def test_the_peak_in_the_state_is_that_of_the_last_step():
    """Delta is a sum of updates over it, so a base with another learning rate may take over."""
    params, state = learned(mechanize(optax.sgd(1.0)), steps=3)
    other = mechanize(optax.sgd(0.25), peak_lr=0.25)
    params, state = train(params, other, 1, state=state)
    plain, plain_state = release(optax.sgd(0.25), state)
    updates, _ = plain.update(params, plain_state, params)
    np.testing.assert_allclose(updates["last"], -scale(state) * params["last"], rtol=1e-6)


@pytest.mark.parametrize("lr", [1.0, 0.1])
def test_labels_are_released_each_at_its_own_rate(lr):
    labels = {"first": "a", "last": "b"}
    params, state = learned(mechanize(optax.sgd(lr), peak_lr=lr, labels=labels))
    assert scales(state)["a"] != scales(state)["b"]
    for given in (labels, lambda params: labels):
        plain, plain_state = release(optax.sgd(lr), state, labels=given)
        updates, _ = plain.update(params, plain_state, params)
        for part, name in labels.items():
            np.testing.assert_allclose(updates[part], -scales(state)[name] * params[part], rtol=1e-6)


def test_labels_that_are_not_those_of_the_state_are_refused_when_released():
    labels = {"first": "a", "last": "b"}
    params, state = learned(mechanize(optax.sgd(1.0), labels=labels), steps=3)
    for given in (None, "a", {"first": "a", "last": "c"}):
        with pytest.raises(ValueError, match=r"the state has tuners named \['a', 'b'\].*pass the labels"):
            release(optax.sgd(1.0), state, labels=given)
    plain, plain_state = release(optax.sgd(1.0), state, labels=lambda params: "a")  # to be asked with parameters only
    with pytest.raises(ValueError, match=r"the state has tuners named \['a', 'b'\].*pass the labels"):
        plain.update(params, plain_state, params)
    _, unlabelled = learned(mechanize(optax.sgd(1.0)), steps=3)
    with pytest.raises(ValueError, match=r"the state has tuners named \['default'\].*pass the labels"):
        release(optax.sgd(1.0), unlabelled, labels=labels)


def test_nothing_can_be_kept_before_anything_was_learned():
    state = mechanize(optax.sgd(1.0)).init(jnp.ones(2))
    with pytest.raises(ValueError, match="nothing has been learned yet"):
        freeze(state)
    with pytest.raises(ValueError, match="nothing has been learned yet"):
        release(optax.sgd(1.0), state)


def test_runs_under_vmap_are_released_one_by_one():
    optimizer = mechanize(optax.sgd(1.0))
    params = jnp.ones((2, 3)) * jnp.array([[1.0], [2.0]])
    state = jax.vmap(optimizer.init)(params)
    for _ in range(2):
        _, state = jax.vmap(optimizer.update)(params, state, params)
    with pytest.raises(ValueError, match="several runs, made under vmap"):
        release(optax.sgd(1.0), state)
    first = jax.tree.map(lambda leaf: leaf[0], state)
    plain, plain_state = release(optax.sgd(1.0), first)
    np.testing.assert_allclose(plain.update(params[0], plain_state)[0], -scale(first) * params[0], rtol=1e-6)
