"""Gradients of held-out data as feedback."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from mechanic.jax import freeze, mechanize, scale, scales
from tests.jax.task import LABELS, PLAIN, assert_close, batch, gradient_of, learned, mover, same_bits


@functools.cache
def tuned():
    """Nothing is forgotten, so that a difference of Deltas is the base's update."""
    return mechanize(optax.sgd(1.0), config={"forgetting": 0.0}, labels=LABELS)


def some_steps_later():
    """The parameters, the state, and gradients of a batch and of a held-out one."""
    params, state = learned(tuned(), steps=5)
    return params, state, gradient_of(params, *batch(7)), gradient_of(params, *batch(8))


@pytest.mark.long
def test_observed_gradients_are_what_each_tuner_learns_from():
    params, state, grads, held_out = some_steps_later()
    step = mover(tuned())
    _, expected = step(held_out, state, params)
    _, after = step(grads, state, params, observed=held_out)
    assert same_bits(scales(after), scales(expected))
    added = jax.tree.map(lambda old, g: old - g, state.delta, grads)
    assert_close(after.delta, added, rtol=1e-6, atol=1e-8)

    broken = jax.tree.map(lambda g: g * jnp.nan, grads)
    _, after = step(broken, state, params, observed=held_out)
    assert same_bits(scales(after), scales(expected))  # the feedback is good, the base gets zeros
    assert same_bits(after.delta, state.delta)
    _, after = step(grads, state, params, observed=broken)
    counted = state.tuner._replace(nonfinite_steps=state.tuner.nonfinite_steps + 1)
    assert same_bits(after.tuner, counted)

    half = {**held_out, "first": jnp.zeros_like(held_out["first"])}  # of which one tuner learns nothing
    _, after = step(grads, state, params, observed=half)
    assert scales(after)["a"] == scales(state)["a"]
    assert scales(after)["b"] != scales(state)["b"]
    assert (after.delta["first"] != state.delta["first"]).any()


@pytest.mark.long
def test_observing_changes_nothing_where_it_is_the_batch_that_is_trained_on_or_the_scale_is_frozen():
    params, state, grads, held_out = some_steps_later()
    ours, expected = mover(tuned())(grads, state, params, observed=grads), mover(tuned())(grads, state, params)
    assert same_bits(scales(ours[1]), scales(expected[1]))
    assert not same_bits(scales(ours[1]), scales(state))
    assert_close(ours, expected, rtol=1e-6)
    frozen = mover(tuned())(grads, freeze(state), params, observed=held_out)
    assert same_bits(frozen, mover(tuned())(grads, freeze(state), params))
    assert same_bits(scales(frozen[1]), scales(state))


@pytest.mark.long
def test_observed_gradients_find_their_way_past_frozen_parameters():
    params = {"free": jnp.asarray([1.0, -2.0]), "frozen": jnp.ones(3)}
    around = optax.selective_transform(PLAIN, freeze_mask={"free": False, "frozen": True})
    state, x, alone = around.init(params), params["free"], PLAIN.init(params["free"])
    for _ in range(2):
        params, state = mover(around)(params, state, params, observed=jax.tree.map(jnp.cos, params))
        x, alone = mover(PLAIN)(x, alone, x, observed=jnp.cos(x))
    assert 0 < scale(state) == scale(alone)
    assert same_bits(params, {"free": x, "frozen": jnp.ones(3)})
