"""Ensembles, derivatives, and arguments of the base."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import mechanize, scale
from mechanic.jax.storage import decode


@pytest.mark.parametrize("delta", [None, "bfloat16", "int8"])
def test_an_ensemble_is_its_members(delta):
    optimizer = mechanize(optax.sgd(1.0), delta=delta)
    members = jax.random.normal(jax.random.key(0), (3, 5))

    def run(x):
        state = optimizer.init(x)
        for _ in range(3):
            updates, state = optimizer.update(jnp.sin(x), state, x)
            x = optax.apply_updates(x, updates)
        return x, scale(state), decode(state.delta, state.delta_scales, jnp.float32)

    together, alone = jax.jit(jax.vmap(run))(members), jax.jit(run)
    for i, member in enumerate(members):
        expected = alone(member)
        for ours, own in zip(together, expected, strict=True):
            np.testing.assert_allclose(ours[i], own, rtol=1e-5 if delta is None else 1e-4)
        assert expected[1] > 0


def test_a_run_can_be_differentiated_with_the_scale_as_given():
    optimizer = mechanize(optax.sgd(1.0), config={"forgetting": 0.0})  # x = x_1 + S Delta, as written out below
    start = jnp.asarray([1.0, -2.0, 0.5])

    def run(factor):
        x, state, course = start, optimizer.init(start), []
        for _ in range(3):
            updates, state = optimizer.update(factor * x**3, state, x)
            x = optax.apply_updates(x, updates)
            course.append(scale(state))
        return x, course

    def written_out(factor, course):
        x, delta = start, 0.0
        for s in course:
            delta -= factor * x**3
            x = start + s * delta
        return x

    derivative, course = jax.jit(jax.jacobian(run, has_aux=True))(1.0)
    expected = jax.jit(jax.jacobian(written_out))(1.0, course)
    assert course[-1] > 0
    np.testing.assert_allclose(derivative, expected, rtol=1e-4)


def test_further_arguments_reach_the_base():
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        seen.append((value, sorted(extra)))
        return updates, state

    base = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    optimizer = mechanize(base)
    jax.eval_shape(
        lambda x: optimizer.update(x, optimizer.init(x), x, value=3.0, observed=x, other=1), jax.typeof(jnp.ones(2))
    )
    assert seen == [(3.0, ["other"])]
