"""Gradients that are not finite, and gradients that are zero."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_task import PLAIN, batch, gradient_of, learned, mlp, same_bits, train_loss
from mechanic.jax import mechanize


def test_a_gradient_that_is_not_finite_leaves_its_tuner_alone_and_the_others_go_on():
    optimizer = mechanize(optax.adamw(1.0), labels={"first": "a", "last": "b"})
    step = jax.jit(optimizer.update)
    params = mlp(hidden=4)
    _, state = step(params, optimizer.init(params), params)
    good = gradient_of(params, *batch(9))
    _, zeroed = step({**good, "first": jnp.zeros_like(good["first"])}, state, params)
    for bad in (jnp.inf, -jnp.inf, jnp.nan, 3e38):
        updates, after = step({**good, "first": good["first"].at[2, 1].set(bad)}, state, params)
        counted = state.tuner._replace(nonfinite_steps=state.tuner.nonfinite_steps + 1)
        for new, old in zip(after.tuner, counted, strict=True):
            np.testing.assert_array_equal(new[0], old[0])
        assert (after.tuner.root_variance[1] != state.tuner.root_variance[1]).all()
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, after)))
        assert same_bits(after.base, zeroed.base)


def test_100_steps_with_bad_ones_among_them_still_train():
    optimizer = mechanize(optax.adam(1.0))
    step, params = jax.jit(optimizer.update), mlp()
    state, start = optimizer.init(params), train_loss(params)
    for t in range(100):
        grads = gradient_of(params, *batch(t))
        if t % 7 == 0:
            grads["last"] = grads["last"].at[0, t % 10].set(jnp.nan)
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert train_loss(params) < start / 2


def test_steps_without_a_gradient_change_neither_tuner_nor_parameters():
    params, state = learned(PLAIN, steps=5)
    updates, after = jax.jit(PLAIN.update)(jax.tree.map(jnp.zeros_like, params), state, params)
    assert same_bits(after, state._replace(count=state.count + 1))
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
