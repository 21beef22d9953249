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
    with pytest.warns(UserWarning, match=r"follows mechanize in .* Make mechanize the last element") as caught:
        READERS[reader](chained(optax.clip_by_global_norm(1.0)))
    assert caught[0].filename == __file__


def test_a_loop_that_logs_is_warned_once():
    state = chained(optax.clip(1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            scale(state)
    assert len(caught) == 1


PARAMS = {"weight": jnp.ones(3)}
CHAINS = {
    "weight decay": chained(optax.add_decayed_weights(0.1)),
    "a masked one": chained(optax.masked(optax.add_decayed_weights(0.1), True)),
    "a schedule": chained(optax.scale_by_schedule(lambda count: 0.5)),
    "momentum": chained(optax.trace(0.9)),
    "clipping after a chain": optax.chain(optax.chain(optax.clip(1.0), PLAIN), optax.clip(1.0)).init(PARAMS),
    "clipping after an accumulation": optax.chain(
        optax.MultiSteps(PLAIN, 2).gradient_transformation(), optax.clip(1.0)
    ).init(PARAMS),
    "clipping after a mask": optax.chain(optax.masked(PLAIN, True), optax.clip(1.0)).init(PARAMS),
    "a named chain": optax.named_chain(("z", PLAIN), ("a", optax.clip(1.0))).init(PARAMS),
}


@pytest.mark.parametrize("name", CHAINS)
def test_whatever_it_is_and_wherever_mechanize_stands_before_it(name):
    for read in (lambda state: scale({"step": 3, "optimizer": state}), jax.jit(scale)):
        with pytest.warns(UserWarning, match="Make mechanize the last element"):
            read(CHAINS[name])


def test_states_beside_each_other_and_before_it_are_not_taken_for_a_chain():
    """All warnings are errors here."""
    state, averages = PLAIN.init(PARAMS), optax.ema(0.9).init(PARAMS)
    scale((PARAMS, state, averages))
    scale((state, optax.adam(1.0).init(PARAMS)))
    scale((state, PARAMS))
    scale([state, averages])
    scale({"a": state, "b": averages})
    scale(optax.named_chain(("z", optax.clip(1.0)), ("a", PLAIN)).init(PARAMS))
