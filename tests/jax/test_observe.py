"""Gradients of held-out data as feedback."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mechanic.jax import freeze, mechanize, scale, scales
from tests.jax.task import batch, gradient_of, learned, same_bits


def test_observed_gradients_are_what_the_tuner_learns_from():
    tuned = mechanize(optax.sgd(1.0), config={"forgetting": 0.0})  # so that a difference of Deltas is the base's update
    params, state = learned(tuned, steps=5)
    grads, held_out = gradient_of(params, *batch(7)), gradient_of(params, *batch(8))
    _, expected = jax.jit(tuned.update)(held_out, state, params)
    observing = jax.jit(lambda *args: tuned.update(*args[:3], observed=args[3]))
    _, after = observing(grads, state, params, held_out)
    assert scale(after) == scale(expected)
    u = jax.tree.map(lambda g: -g, grads)
    assert all(
        np.allclose(new, old + step, rtol=1e-6)
        for new, old, step in zip(*(jax.tree.leaves(t) for t in (after.delta, state.delta, u)), strict=True)
    )
    broken = jax.tree.map(lambda g: g * jnp.nan, grads)
    _, after = observing(broken, state, params, held_out)
    assert scale(after) == scale(expected)  # the feedback is good, the base gets zeros
    assert same_bits(after.delta, state.delta)
    _, after = observing(grads, state, params, broken)
    counted = state.tuner._replace(nonfinite_steps=state.tuner.nonfinite_steps + 1)
    assert same_bits(after.tuner, counted)


def test_observed_gradients_find_their_way_past_frozen_parameters():
    params = {"free": jnp.asarray([1.0, -2.0]), "frozen": jnp.ones(3)}
    optimizer = mechanize(optax.sgd(1.0))
    around = optax.selective_transform(optimizer, freeze_mask={"free": False, "frozen": True})
    state, alone = around.init(params), optimizer.init(params["free"])

    def step(optimizer, x, state):
        return optimizer.update(x, state, x, observed=jax.tree.map(jnp.cos, x))

    for _ in range(2):
        updates, state = jax.jit(step, static_argnums=0)(around, params, state)
        update, alone = jax.jit(step, static_argnums=0)(optimizer, params["free"], alone)
    assert 0 < scale(state) == scale(alone)
    assert same_bits(updates, {"free": update, "frozen": jnp.zeros(3)})


def observing_step(optimizer):
    return jax.jit(lambda grads, state, params, observed: optimizer.update(grads, state, params, observed=observed))


def test_observing_the_batch_that_is_trained_on_changes_nothing():
    optimizer = mechanize(optax.adamw(1.0))
    params, state = learned(optimizer, steps=5)
    grads = gradient_of(params, *batch(7))
    ours, expected = (
        observing_step(optimizer)(grads, state, params, grads),
        jax.jit(optimizer.update)(grads, state, params),
    )
    assert scale(ours[1]) == scale(expected[1]) != scale(state)
    for one, other in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_frozen_scale_ignores_observations():
    optimizer = mechanize(optax.adamw(1.0))
    params, state = learned(optimizer, steps=5)
    frozen, grads, held_out = freeze(state), gradient_of(params, *batch(7)), gradient_of(params, *batch(8))
    ours = observing_step(optimizer)(grads, frozen, params, held_out)
    assert same_bits(ours, jax.jit(optimizer.update)(grads, frozen, params))
    assert scale(ours[1]) == scale(state)


def test_tuners_observe_apart():
    """Of a held-out gradient that is zero in one part, that part's tuner learns nothing."""
    optimizer = mechanize(optax.sgd(1.0), labels={"first": "a", "last": "b"})
    params, state = learned(optimizer, steps=5)
    grads, held_out = gradient_of(params, *batch(7)), gradient_of(params, *batch(8))
    held_out["first"] = jnp.zeros_like(held_out["first"])
    _, after = observing_step(optimizer)(grads, state, params, held_out)
    assert scales(after)["a"] == scales(state)["a"]
    assert scales(after)["b"] != scales(state)["b"]
    assert (after.delta["first"] != state.delta["first"]).any()
