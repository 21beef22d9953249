"""A transformation after mechanize in a chain changes its updates: whoever reads the state is warned."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

from mechanic.jax import freeze, nonfinite_steps, release, scale, scales
from tests.jax.task import PLAIN


def chained(*after):
    """A state in which something was learned, with something behind Mechanic."""
    state = optax.chain(optax.clip(1.0), PLAIN, *after).init({"weight": jnp.ones(3)})
    return optax.tree.set(state, scale={"default": jnp.ones(())})


READERS = {
    "scale": scale,
    "scales": scales,
    "nonfinite_steps": nonfinite_steps,
    "freeze": freeze,
    "release": lambda state: release(optax.sgd(1.0), state),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_stands_after_mechanize_in_a_chain_is_warned_of(reader):
    with pytest.warns(UserWarning, match=r"mechanize stands last.*put clipping.*before it") as caught:
        READERS[reader](chained(optax.clip_by_global_norm(1.0)))
    assert caught[0].filename == __file__


def test_a_loop_that_logs_is_warned_once():
    state = chained(optax.clip(1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            scale(state)
    assert len(caught) == 1


AFTER = {
    "weight decay": optax.add_decayed_weights(0.1),
    "a masked one": optax.masked(optax.add_decayed_weights(0.1), True),
    "a schedule": optax.scale_by_schedule(lambda count: 0.5),
    "momentum": optax.trace(0.9),
}


@pytest.mark.parametrize("after", AFTER)
def test_whatever_it_is(after):
    with pytest.warns(UserWarning, match="mechanize stands last"):
        scale({"step": 3, "optimizer": chained(AFTER[after])})


def test_also_where_mechanize_is_inside_something_that_stands_before_others():
    params = {"weight": jnp.ones(3)}
    for inner in (optax.chain(optax.clip(1.0), PLAIN), optax.MultiSteps(PLAIN, 2), optax.masked(PLAIN, True)):
        transformation = getattr(inner, "gradient_transformation", lambda inner=inner: inner)()
        state = optax.chain(transformation, optax.clip(1.0)).init(params)
        with pytest.warns(UserWarning, match="mechanize stands last"):
            scale(state)
        with pytest.warns(UserWarning, match="mechanize stands last"):
            jax.jit(scale)(state)


def test_also_in_a_named_chain():
    params = {"weight": jnp.ones(3)}
    scale(optax.named_chain(("z", optax.clip(1.0)), ("a", PLAIN)).init(params))
    with pytest.warns(UserWarning, match="mechanize stands last"):
        scale(optax.named_chain(("z", PLAIN), ("a", optax.clip(1.0))).init(params))


def test_states_beside_each_other_are_not_taken_for_a_chain():
    """All warnings are errors here."""
    params = {"weight": jnp.ones(3)}
    state = PLAIN.init(params)
    averages = optax.ema(0.9).init(params)
    scale((params, state, averages))
    scale((state, optax.adam(1.0).init(params)))
    scale((state, params))
    scale([state, averages])
    scale({"a": state, "b": averages})
