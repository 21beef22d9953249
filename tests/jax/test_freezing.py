"""Freeze the scale, or return to the base optimizer at what was learned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import freeze, learned_rates, mechanize, release, scale
from mechanic.tuner import TunerState
from tests.jax.task import LABELS, PLAIN, assert_close, learned, mlp, mover, stepper, train, train_loss


@pytest.mark.long
def test_freezing_and_releasing_are_the_base_at_the_learned_rate_without_delta():
    """Whatever learning rate the base has: the state knows its peak."""
    base = optax.adam(0.1)
    optimizer = mechanize(base, peak_lr=0.1)
    params, state = learned(optimizer)
    frozen_state = freeze(state)
    saved = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - sum(
        leaf.nbytes for leaf in jax.tree.leaves(frozen_state)
    )
    assert saved == 4 * sum(leaf.size for leaf in jax.tree.leaves(params)) + 4 * 5 * len(TunerState._fields)
    plain, plain_state = release(base, state)
    rate = learned_rates(state)["default"]
    written_out = optax.adam(float(rate))
    frozen, after = train(params, optimizer, 20, state=frozen_state)
    released, _ = train(params, plain, 20, state=plain_state)
    expected, _ = train(params, written_out, 20, state=plain_state[0])
    assert stepper(optimizer)._cache_size() == 2  # one before, one after
    assert scale(after) == rate
    assert train_loss(expected) < 0.97 * train_loss(params)  # that there is something to compare
    for ours in (frozen, released):
        assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def assert_released_at(rates, base, params, state, labels=None):
    """Of plain SGD: the update of every parameter is its gradient, here the parameter, times its rate."""
    plain, plain_state = release(base, state, labels=labels)
    updates, _ = plain.update(params, plain_state, params)
    for name, rate in rates.items():
        np.testing.assert_allclose(updates[name], -rate * params[name], rtol=1e-6)


@pytest.mark.long
def test_the_peak_in_the_state_is_that_of_the_last_step():
    """Delta is a sum of updates over it, so a base with another learning rate may take over."""
    params, state = learned(PLAIN, steps=3)
    params, state = mover(mechanize(optax.sgd(0.25), peak_lr=0.25))(params, state, params)
    assert_released_at(dict.fromkeys(params, learned_rates(state)["default"]), optax.sgd(0.25), params, state)


@pytest.mark.long
def test_labels_are_released_each_at_its_own_rate():
    params, state = learned(mechanize(optax.sgd(0.1), peak_lr=0.1, labels=LABELS), steps=5)
    learned_by_name = learned_rates(state)
    assert learned_by_name["a"] != learned_by_name["b"]
    rates = {part: learned_by_name[name] for part, name in LABELS.items()}
    for given in (LABELS, lambda params: LABELS):
        assert_released_at(rates, optax.sgd(0.1), params, state, given)


def made_up(params, optimizer=PLAIN):
    """A state in which every S is 0.5."""
    state = optimizer.init(params)
    scale = jax.tree.map(lambda s: s + 0.5, state.scale)
    return state._replace(scale=scale, tuner=state.tuner._replace(scales=state.tuner.scales.at[:, 0].set(0.5)))


def test_labels_that_are_not_those_of_the_state_are_refused_when_released():
    params = mlp(hidden=4)
    state = made_up(params, mechanize(optax.sgd(1.0), labels=LABELS))
    for given in (None, "a", {"first": "a", "last": "c"}):
        with pytest.raises(ValueError, match=r"the state has tuners named \['a', 'b'\].*pass the labels"):
            release(optax.sgd(1.0), state, labels=given)
    plain, plain_state = release(optax.sgd(1.0), state, labels=lambda params: "a")  # to be asked with parameters only
    with pytest.raises(ValueError, match=r"the state has tuners named \['a', 'b'\].*pass the labels"):
        plain.update(params, plain_state, params)
    with pytest.raises(ValueError, match=r"the state has tuners named \['default'\].*pass the labels"):
        release(optax.sgd(1.0), made_up(params), labels=LABELS)


def test_nothing_can_be_kept_before_anything_was_learned():
    state = PLAIN.init(jnp.ones(2))
    for keep in (freeze, lambda state: release(optax.sgd(1.0), state)):
        with pytest.raises(ValueError, match="nothing has been learned yet"):
            keep(state)


@pytest.mark.long
def test_runs_under_vmap_are_released_one_by_one():
    params = {"x": jnp.ones((2, 3)) * jnp.array([[1.0], [2.0]])}
    state = jax.vmap(made_up)(params)
    with pytest.raises(ValueError, match="several runs, made under vmap"):
        release(optax.sgd(1.0), state)
    params, first = jax.tree.map(lambda leaf: leaf[0], (params, state))
    assert_released_at({"x": 0.5}, optax.sgd(1.0), params, first)
