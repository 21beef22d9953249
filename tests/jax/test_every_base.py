"""Every optimizer that Optax's own tests put into its mechanize, and some more, through one table of behaviours.

A new base is a new row of BASES.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from mechanic.jax import mechanize, scale
from tests.jax.task import avals, batch, digits, mlp, mover, same_bits

BASES = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
    "adamw": optax.adamw,
    "adamax": optax.adamax,
    "adamaxw": optax.adamaxw,
    "adan": optax.adan,
    "amsgrad": optax.amsgrad,
    "lamb": optax.lamb,
    "lion": functools.partial(optax.lion, b1=0.99),
    "noisy_sgd": functools.partial(optax.noisy_sgd, eta=1e-4, key=0),
    "novograd": optax.novograd,
    "optimistic_gradient_descent": functools.partial(optax.optimistic_gradient_descent, alpha=0.7, beta=0.1),
    "rmsprop": optax.rmsprop,
    "rmsprop with momentum": functools.partial(optax.rmsprop, momentum=0.9),
    "adabelief": optax.adabelief,
    "radam": optax.radam,
    "sm3": optax.sm3,
    "yogi": functools.partial(optax.yogi, b1=0.99),
    # From here on not in optax/contrib/_common_test.py, or noted there as not working in Optax's mechanize.
    "lars": optax.lars,
    "fromage": lambda lr: optax.fromage(0.01 * lr),  # not proportional to lr, and at 1 no optimizer at all
    "adafactor": optax.adafactor,
    "muon": optax.contrib.muon,
}


def model():
    """Small, for what takes the time is compiling."""
    return {"weight": mlp()["first"][:, :10], "bias": jnp.zeros(10)}


@jax.jit
def loss_of(params, images, labels):
    logits = images @ params["weight"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


gradient_of = jax.jit(jax.grad(loss_of))


@functools.cache
def wrapped(name):
    return mechanize(BASES[name](1.0))


def donating(name):
    return mover(wrapped(name), donate_argnums=(1, 2))


def assert_is_a_tree_like_any_other(state, optimizer):
    leaves, structure = jax.tree.flatten(state)
    assert same_bits(jax.tree.unflatten(structure, leaves), state)
    assert same_bits(optax.tree.map_params(optimizer, lambda v: v, state), state)
    assert same_bits(optax.tree.get(state, "delta"), state.delta)
    assert scale(optax.tree.set(state, scale={"default": jnp.float32(2.0)})) == 2.0


@pytest.mark.long
@pytest.mark.parametrize("name", BASES)
def test_it_trains_without_compiling_twice_changing_dtypes_or_keeping_donated_buffers(name):
    params, step = model(), donating(name)
    state = wrapped(name).init(params)
    assert_is_a_tree_like_any_other(state, wrapped(name))
    shapes = jax.eval_shape(wrapped(name).init, params)
    before = avals((params, state))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    given = jax.tree.leaves((params, state._replace(base=None)))  # Adafactor does not use all of its own
    start = loss_of(params, *digits())
    for t in range(150):
        params, state = step(gradient_of(params, *batch(t)), state, params)
    assert loss_of(params, *digits()) < start / 1.3
    assert scale(state) > 0
    assert step._cache_size() == 1
    assert avals((params, state)) == before
    assert all(buffer.is_deleted() for buffer in given)


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw", "noisy_sgd"])  # which has a random key in its state
def test_it_works_inside_multi_steps_masked_and_apply_if_finite(name):
    """One more parameter is masked, and every gradient comes twice, with one that is not finite in between."""
    inner = optax.masked(wrapped(name), {"weight": True, "bias": True, "idle": False})
    accumulating = optax.MultiSteps(inner, every_k_schedule=2).gradient_transformation()
    optimizer = optax.apply_if_finite(accumulating, max_consecutive_errors=3)
    params, plain = {**model(), "idle": jnp.ones(3)}, model()
    state, plain_state = optimizer.init(params), wrapped(name).init(plain)
    for t in range(3):
        grads = gradient_of(plain, *batch(t))
        broken = {**grads, "weight": grads["weight"].at[0, 0].set(jnp.inf)}
        for each in (grads, broken, grads):
            params, state = mover(optimizer)({**each, "idle": jnp.zeros(3)}, state, params)
        plain, plain_state = donating(name)(grads, plain_state, plain)
    assert mover(optimizer)._cache_size() == 1
    assert 0 < scale(state) == pytest.approx(float(scale(plain_state)), rel=1e-5)
    for key in plain:
        np.testing.assert_allclose(params[key], plain[key], rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_jitted_init_gives_buffers_that_can_be_donated():
    params = model()
    state = jax.jit(wrapped("adamw").init)(params)
    assert same_bits(state, wrapped("adamw").init(params))
    for t in range(2):
        params, state = donating("adamw")(gradient_of(params, *batch(t)), state, params)


@pytest.mark.long
def test_the_states_layout_follows_from_that_of_the_parameters():
    """How shardings of a state are made: optax.tree.map_params with a tree like the parameters."""
    optimizer, names = mechanize(optax.adamw(1.0), delta="int8"), {"weight": "rows", "bias": "all"}

    def layout_of(params, known):
        state = optimizer.init(params)
        return optax.tree.map_params(known, lambda _, name: name, state, names, transform_non_params=lambda _: "other")

    layout = layout_of(model(), optimizer)
    assert layout.delta == layout.delta_scales == layout.base[0].mu == names
    assert set(jax.tree.leaves((layout.scale, layout.tuner))) == {"other"}
    # As docs/jax.md says: it cannot know that there are residuals.
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), model())
    layout = layout_of(half, lambda params: optimizer.init(params)._replace(residual=params))
    assert layout.delta == layout.residual == layout.base[0].mu == names
