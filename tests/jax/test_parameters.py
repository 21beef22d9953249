"""Parameters of every kind, in trees of every kind, also where others write to them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import mechanize, scale
from tests.jax.task import batch, learned, mlp, same_bits, stepper, train


def run(optimizer, params, steps):
    """On a quadratic whose minimum is at 3."""

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda p: p - 3, params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scalars_and_empty_arrays(dtype):
    params = {"scalar": jnp.ones((), dtype), "empty": jnp.ones((0, 3), dtype), "matrix": jnp.ones((2, 3), dtype)}
    moved, state = run(mechanize(optax.adamw(1.0)), params, 30)
    alone, its_state = run(mechanize(optax.adamw(1.0)), {name: params[name] for name in ("scalar", "matrix")}, 30)
    assert moved["empty"].shape == (0, 3)
    assert moved["scalar"] > 1.5
    assert same_bits({name: moved[name] for name in alone}, alone)
    assert scale(state) == scale(its_state)


def test_no_parameters_at_all():
    optimizer = mechanize(optax.adamw(1.0))
    updates, state = jax.jit(optimizer.update)({}, optimizer.init({}), {})
    assert updates == {}
    assert scale(state) == 0


def test_the_tree_does_not_matter():
    """One array alone, in a dict, or inside lists."""
    x = jnp.linspace(-1.0, 1.0, 6)
    (bare, state), *others = (
        run(mechanize(optax.adam(1.0)), tree, 10) for tree in (x, {"x": x}, [None, {"y": ({"x": x},)}])
    )
    assert scale(state) > 0
    for params, other_state in others:
        assert same_bits(jax.tree.leaves(params), [bare])
        assert scale(other_state) == scale(state)


def test_parameters_may_come_as_numpy_arrays():
    x = np.linspace(-1, 1, 6, dtype=np.float32)
    as_jax, as_numpy = (run(mechanize(optax.adam(1.0)), {"x": each}, 5) for each in (jnp.asarray(x), x))
    assert same_bits(as_jax, as_numpy)


def test_complex_parameters_move_as_pairs_of_real_ones():
    optimizer = mechanize(optax.sgd(1.0))
    x = jnp.asarray([1.0 + 2.0j, -0.5 + 0.1j])
    pair = jnp.stack([x.real, x.imag])
    state, pair_state, update = optimizer.init(x), optimizer.init(pair), jax.jit(optimizer.update)
    for _ in range(4):
        updates, state = update(2 * x, state, x)
        x = optax.apply_updates(x, updates)
        updates, pair_state = update(2 * pair, pair_state, pair)
        pair = optax.apply_updates(pair, updates)
    np.testing.assert_allclose(jnp.stack([x.real, x.imag]), pair, rtol=1e-5)
    assert 0 < scale(state) == pytest.approx(float(scale(pair_state)), rel=1e-5)


def test_dtypes_may_be_mixed():
    params = {"first": mlp(dtype=jnp.bfloat16)["first"], "last": mlp()["last"]}
    trained, state = train(params, mechanize(optax.adamw(1.0)), 30)
    assert {name: p.dtype for name, p in trained.items()} == {"first": jnp.bfloat16, "last": jnp.float32}
    assert {name: d.dtype for name, d in state.delta.items()} == {"first": jnp.float32, "last": jnp.float32}
    assert scale(state) > 0


@pytest.mark.parametrize("base", [optax.sgd, optax.adamw, optax.lion])
def test_a_write_to_the_parameters_between_steps_survives(base):
    """The next step starts from what was written: it adds an update, and never sets the parameters to x_1 + S Delta."""
    optimizer = mechanize(base(1.0))
    params, state = learned(optimizer)
    written = jax.tree.map(lambda p: p + 1.0, params)
    moved, after = stepper(optimizer)(written, state, *batch(20))
    for name, p in written.items():
        expected = p + scale(after) * after.delta[name] - scale(state) * state.delta[name]
        np.testing.assert_allclose(moved[name], expected, rtol=1e-5, atol=1e-5)


def test_delta_starts_at_zero_also_where_a_parameter_is_not_a_number():
    params = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf, 0.0])
    for init in (mechanize(optax.sgd(1.0)).init, jax.jit(mechanize(optax.sgd(1.0)).init)):
        assert not init(params).delta.any()
