"""A scale per part of the model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import mechanize, scale, scales
from tests.jax.task import LABELS, PLAIN, learned, mlp, mover, same_bits


def by_shape(params):
    return jax.tree.map(lambda p: str(p.shape[0]), params)


@functools.cache
def labelled(*names):
    return mechanize(optax.sgd(1.0), labels=dict(zip(LABELS, names, strict=True)))


@pytest.mark.long
def test_labels_tune_parts_as_if_they_were_alone():
    """Where the gradients do not depend on the other part."""
    together, params = labelled("a", "b"), mlp(hidden=4)
    state, parts = together.init(params), {part: (params[part], PLAIN.init(params[part])) for part in params}
    for t in range(5):
        grads = jax.tree.map(lambda p, t=t: jnp.cos(p + t), params)
        params, state = mover(together)(grads, state, params)
        for part, (x, own) in parts.items():
            parts[part] = mover(PLAIN)(grads[part], own, x)
            np.testing.assert_allclose(params[part], parts[part][0], rtol=1e-5, atol=1e-7)
    for part, name in LABELS.items():
        assert scales(state)[name] == pytest.approx(float(scale(parts[part][1])), rel=1e-5)
    assert scales(state)["a"] != scales(state)["b"]
    assert state.tuner.scales.shape == (2, 5)


@pytest.mark.long
def test_labels_may_be_a_function():
    ours, expected = (learned(each, 5) for each in (mechanize(optax.sgd(1.0), labels=by_shape), labelled("64", "4")))
    assert sorted(scales(ours[1])) == ["4", "64"]
    assert same_bits(ours, expected)


@pytest.mark.long
@pytest.mark.parametrize("labels", ["all", {"first": "all", "last": "all"}], ids=["one name", "the same name twice"])
def test_one_label_gives_the_bits_of_none(labels):
    params, state = learned(mechanize(optax.sgd(1.0), labels=labels), 5)
    expected, plain = learned(PLAIN, 5)
    assert same_bits(params, expected)
    assert same_bits(scales(state)["all"], scale(plain))
