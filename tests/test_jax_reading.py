"""Reading what was learned, through whatever stands around Mechanic."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_task import AROUND, PLAIN, learned, mlp, same_bits
from mechanic.jax import freeze, mechanize, nonfinite_steps, release, scale, scales


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
