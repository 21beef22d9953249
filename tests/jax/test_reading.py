"""Reading what was learned. test_transformations.py reads through what stands around Mechanic."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import learned_rates, mechanize, nonfinite_steps, release, scale, scales
from tests.jax.task import LABELS, PLAIN, learned, mlp, mover, same_bits


@pytest.mark.long
def test_it_may_be_built_or_wrapped_by_inject_hyperparams():
    injected = optax.inject_hyperparams(mechanize)(optax.sgd(0.5), peak_lr=0.5)
    around = mechanize(optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(0.5)), peak_lr=0.5)
    expected, _ = learned(PLAIN, steps=3)
    for optimizer in (around, injected):
        params, state = learned(optimizer, steps=3)
        assert scale(state) > 0
        assert same_bits(params, expected)
    plain, plain_state = release(optax.sgd(0.5), state)  # the peak that was injected is in the state
    updates, _ = plain.update(params, plain_state, params)
    np.testing.assert_allclose(updates["last"], -learned_rates(state)["default"] * params["last"], rtol=1e-6)


def test_states_that_hold_no_tuner_or_several_of_one_name_say_so():
    params = mlp(hidden=4)
    with pytest.raises(ValueError, match=r"no state of mechanic\.jax\.mechanize in a tuple"):
        scale(optax.adam(1.0).init(params))
    with pytest.raises(ValueError, match="several Mechanics with a tuner named 'default'"):
        scales((PLAIN.init(params), PLAIN.init(params)))
    with pytest.raises(ValueError, match="not one tuner but 2, a, b"):
        scale(mechanize(optax.sgd(1.0), labels=LABELS).init(params))


def test_steps_whose_gradients_are_not_finite_are_counted_by_tuner():
    """Where all are, S stays 0, and this count says why."""
    optimizer, params = mechanize(optax.sgd(1.0), labels=LABELS), mlp(hidden=4)
    state = optimizer.init(params)
    assert nonfinite_steps(state) == {"a": 0, "b": 0}
    for t in range(5):
        grads = {"first": params["first"] * jnp.nan, "last": params["last"] * (jnp.inf if t == 2 else 1.0)}
        _, state = mover(optimizer)(grads, state, params)
    assert nonfinite_steps(state) == {"a": 5, "b": 1}
    assert scales(state)["a"] == 0 < scales(state)["b"]
    assert all(count.dtype == jnp.int32 for count in jax.tree.leaves(nonfinite_steps(state)))
