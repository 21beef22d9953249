"""What may stand around Mechanic, ensembles, derivatives, and arguments of the base."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import freeze, mechanize, nonfinite_steps, release, scale, scales
from mechanic.jax.state import find
from mechanic.jax.storage import decode
from tests.jax.task import AROUND, mover


@pytest.mark.long
@pytest.mark.parametrize("around", AROUND)
def test_inside_others_it_learns_and_is_read_counted_frozen_and_released(around):
    """One step has no gradient and the last a NaN: ``apply_if_finite`` rejects it as a whole."""
    schedule, target = optax.linear_schedule(0.5, 0.0, 10), jnp.asarray([3.0, -1.0, 2.0])
    optimizer = AROUND[around](mechanize(optax.sgd(schedule), peak_lr=0.5, schedule=schedule, delta="int8"))
    params = {"weight": jnp.ones(3)}
    state, start = optimizer.init(params), jnp.linalg.norm(1 - target)
    for factor in (1.0, 0.0, 1.0, 1.0, jnp.nan):  # which MultiSteps would keep
        params, state = mover(optimizer)({"weight": factor * (params["weight"] - target)}, state, params)
    (mechanic,) = find(state)
    rejects = around == "apply_if_finite"
    assert jnp.linalg.norm(params["weight"] - target) < start
    assert mechanic.delta["weight"].dtype == jnp.int8
    assert mechanic.count == mechanic.base[1].count == (4 if rejects else 5)
    assert mechanic.count.dtype == jnp.int32

    assert scale(state) == jax.jit(scale)(state) > 0
    assert scales({"step": 3, "optimizer": state}) == {"default": scale(state)}
    bad = {"default": 0 if rejects else 1}
    assert nonfinite_steps({"optimizer": state}) == jax.jit(nonfinite_steps)(state) == bad
    assert nonfinite_steps(freeze(state)) == {}

    for each in (state, freeze(state)):
        plain, plain_state = release(optax.sgd(schedule), each)
        updates, _ = plain.update(params, plain_state, params)
        expected = -scale(state) * schedule(mechanic.count) / 0.5 * params["weight"]
        np.testing.assert_allclose(updates["weight"], expected, rtol=1e-6)
    frozen = freeze(state)
    for _ in range(2):
        params, frozen = mover(optimizer)(params, frozen, params)
    assert find(frozen)[0].count == mechanic.count + 2


@pytest.mark.long
@pytest.mark.parametrize("delta", [None, "bfloat16", "int8"])
def test_an_ensemble_is_its_members(delta):
    """Also where one of them has a gradient that is not finite."""
    optimizer = mechanize(optax.sgd(1.0), delta=delta)
    members, factors = jax.random.normal(jax.random.key(0), (3, 5)), jnp.asarray([1.0, jnp.nan, 1.0])

    def run(x, factor):
        def step(carry, factor):
            x, state = carry
            updates, state = optimizer.update(factor * jnp.sin(x), state, x)
            return (optax.apply_updates(x, updates), state), None

        (x, state), _ = jax.lax.scan(step, (x, optimizer.init(x)), jnp.stack([1.0, factor, 1.0]))
        return x, scale(state), decode(state.delta, state.delta_scales, jnp.float32), nonfinite_steps(state)["default"]

    together, alone = jax.jit(jax.vmap(run))(members, factors), jax.jit(run)
    assert together[-1].tolist() == [0, 1, 0]
    for i, (member, factor) in enumerate(zip(members, factors, strict=True)):
        expected = alone(member, factor)
        for ours, own in zip(together, expected, strict=True):
            np.testing.assert_allclose(ours[i], own, rtol=1e-5 if delta is None else 1e-4)
        assert expected[1] > 0


@pytest.mark.long
def test_a_run_can_be_differentiated_with_the_scale_as_given():
    optimizer = mechanize(optax.sgd(1.0), config={"forgetting": 0.0})  # x = x_1 + S Delta, as written out below
    start = jnp.asarray([1.0, -2.0, 0.5])

    def run(factor):
        def step(carry, _):
            x, state = carry
            updates, state = optimizer.update(factor * x**3, state, x)
            return (optax.apply_updates(x, updates), state), scale(state)

        (x, _), course = jax.lax.scan(step, (start, optimizer.init(start)), length=3)
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

    optimizer = mechanize(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    jax.eval_shape(
        lambda x: optimizer.update(x, optimizer.init(x), x, value=3.0, observed=x, other=1), jax.typeof(jnp.ones(2))
    )
    assert seen == [(3.0, ["other"])]
