"""Reading what was learned, through whatever stands around Mechanic."""

import jax
import jax.numpy as jnp
import optax
import pytest

from mechanic.jax import freeze, mechanize, nonfinite_steps, scale, scales
from tests.jax.task import AROUND, PLAIN, learned, mlp, same_bits


@pytest.mark.parametrize("around", AROUND)
def test_the_scale_is_read_through_what_stands_around(around):
    optimizer, params = AROUND[around](PLAIN), {"weight": jnp.ones(3)}
    state = optimizer.init(params)
    for _ in range(2):
        _, state = jax.jit(optimizer.update)(params, state, params)
    assert scale(state) > 0
    assert scales({"step": 3, "optimizer": state}) == {"default": scale(state)}
    assert jax.jit(scale)(state) == scale(state)


def test_it_may_be_built_or_wrapped_by_inject_hyperparams():
    injected = optax.inject_hyperparams(mechanize)(optax.sgd(0.5), peak_lr=0.5)
    around = mechanize(optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(0.5)), peak_lr=0.5)
    expected, _ = learned(PLAIN, steps=5)
    for optimizer in (injected, around):
        params, state = learned(optimizer, steps=5)
        assert scale(state) > 0
        assert same_bits(params, expected)


def test_states_that_hold_no_tuner_or_several_of_one_name_say_so():
    params = mlp(hidden=4)
    with pytest.raises(ValueError, match=r"no state of mechanic\.jax\.mechanize in a tuple"):
        scale(optax.adam(1.0).init(params))
    two = mechanize(optax.sgd(1.0)).init(params), mechanize(optax.sgd(1.0)).init(params)
    with pytest.raises(ValueError, match="several Mechanics with a tuner named 'default'"):
        scales(two)
    with pytest.raises(ValueError, match="not one tuner but 2, a, b"):
        scale(mechanize(optax.sgd(1.0), labels={"first": "a", "last": "b"}).init(params))


def test_steps_whose_gradients_are_not_finite_are_counted_by_tuner():
    """Where all are, S stays 0, and this count says why."""
    optimizer = mechanize(optax.adamw(1.0), labels={"first": "a", "last": "b"})
    params = mlp(hidden=4)
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    assert nonfinite_steps(state) == {"a": 0, "b": 0}
    for t in range(5):
        grads = {"first": params["first"] * jnp.nan, "last": params["last"] * (jnp.inf if t == 2 else 1.0)}
        _, state = step(grads, state, params)
    assert nonfinite_steps(state) == {"a": 5, "b": 1}
    assert scales(state)["a"] == 0 < scales(state)["b"]
    assert all(count.dtype == jnp.int32 for count in nonfinite_steps(state).values())


@pytest.mark.parametrize("around", AROUND)
def test_the_count_is_read_through_what_stands_around_and_is_gone_once_frozen(around):
    optimizer, params = AROUND[around](PLAIN), {"weight": jnp.ones(3)}
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in (1.0, 1.0, jnp.inf):
        _, state = step({"weight": jnp.full(3, gradient)}, state, params)
    expected = {"default": 0 if around == "apply_if_finite" else 1}  # which rejects the whole step
    assert nonfinite_steps({"optimizer": state}) == expected
    assert jax.jit(nonfinite_steps)(state) == expected
    assert nonfinite_steps(freeze(state)) == {}


def test_the_members_of_an_ensemble_count_apart():
    def run(x, factor):
        state = PLAIN.init(x)
        for t in range(3):
            _, state = PLAIN.update(jnp.where(t == 1, factor, 1.0) * x, state, x)
        return state

    states = jax.jit(jax.vmap(run))(jnp.ones((2, 3)), jnp.asarray([1.0, jnp.nan]))
    assert nonfinite_steps(states)["default"].tolist() == [0, 1]
