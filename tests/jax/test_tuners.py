"""A scale per part of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import mechanize, scale, scales
from tests.jax.task import learned, mlp, same_bits


def test_labels_tune_parts_as_if_they_were_alone():
    """Where the gradients do not depend on the other part."""
    labels = {"first": "a", "last": "b"}
    together, params = mechanize(optax.adam(1.0), labels=labels), mlp(hidden=4)
    state, step = together.init(params), jax.jit(together.update)
    alone = {part: mechanize(optax.adam(1.0)) for part in labels}
    steps = {part: jax.jit(alone[part].update) for part in labels}
    parts = {part: (params[part], alone[part].init(params[part])) for part in labels}
    for t in range(5):
        grads = jax.tree.map(lambda p, t=t: jnp.cos(p + t), params)
        updates, state = step(grads, state, params)
        for part, (x, own) in parts.items():
            update, own = steps[part](grads[part], own, x)
            np.testing.assert_allclose(updates[part], update, rtol=1e-5, atol=1e-7)
            parts[part] = optax.apply_updates(x, update), own
        params = optax.apply_updates(params, updates)
    for part, name in labels.items():
        assert scales(state)[name] == pytest.approx(float(scale(parts[part][1])), rel=1e-5)
    assert scales(state)["a"] != scales(state)["b"]
    assert state.tuner.scales.shape == (2, 5)


def test_labels_may_be_a_function():
    def by_shape(params):
        return jax.tree.map(lambda p: f"{p.shape[0]} rows", params)

    written_out = {"first": "64 rows", "last": "4 rows"}
    ours, expected = (learned(mechanize(optax.sgd(1.0), labels=labels), steps=5) for labels in (by_shape, written_out))
    assert sorted(scales(ours[1])) == ["4 rows", "64 rows"]
    assert same_bits(ours, expected)


@pytest.mark.parametrize("labels", ["all", {"first": "all", "last": "all"}], ids=["one name", "the same name twice"])
def test_one_label_gives_the_bits_of_none(labels):
    (params, state), (expected, plain) = (learned(mechanize(optax.adam(1.0), labels=each)) for each in (labels, None))
    assert same_bits(params, expected)
    assert same_bits(scales(state)["all"], scale(plain))
