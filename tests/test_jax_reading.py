"""Reading what was learned, through whatever stands around Mechanic."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_task import AROUND, PLAIN, learned, mlp, same_bits
from mechanic.jax import mechanize, scale, scales


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
    injected = optax.inject_hyperparams(mechanize)(optax.sgd(0.5), unit=0.5)
    around = mechanize(optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(0.5)), unit=0.5)
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
