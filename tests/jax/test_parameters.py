"""Parameters of every kind, in trees of every kind, also where others write to them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import mechanize, scale
from tests.jax.task import PLAIN, batch, learned, mlp, mover, same_bits, stepper, train, train_loss


def run(params, steps=10, optimizer=PLAIN):
    """On a quadratic whose minimum is at 3."""
    state = optimizer.init(params)
    for _ in range(steps):
        params, state = mover(optimizer)(jax.tree.map(lambda p: p - 3, params), state, params)
    return params, state


@pytest.mark.long
def test_scalars_and_empty_arrays_of_either_precision():
    shapes = {"scalar": (), "empty": (0, 3), "matrix": (2, 3)}
    params = {f"{name} in {d}": jnp.ones(s, d) for name, s in shapes.items() for d in ("float32", "bfloat16")}
    moved, state = run(params, 30)
    alone, its_state = run({name: p for name, p in params.items() if p.size}, 30)
    assert {name: p.shape for name, p in moved.items()} == {name: p.shape for name, p in params.items()}
    assert moved["scalar in float32"] > 1.5
    assert moved["scalar in bfloat16"] > 1.5
    assert same_bits({name: moved[name] for name in alone}, alone)
    assert scale(state) == scale(its_state)


def test_no_parameters_at_all():
    updates, state = jax.jit(PLAIN.update)({}, PLAIN.init({}), {})
    assert updates == {}
    assert scale(state) == 0


@pytest.mark.long
def test_the_tree_does_not_matter_and_neither_does_it_that_it_holds_numpy_arrays():
    x = np.linspace(-1, 1, 6, dtype=np.float32)
    (bare, state), *others = map(run, (jnp.asarray(x), {"x": x}, [None, {"y": ({"x": jnp.asarray(x)},)}]))
    assert scale(state) > 0
    for params, other_state in others:
        assert same_bits(jax.tree.leaves(params), [bare])
        assert scale(other_state) == scale(state)


@pytest.mark.long
def test_complex_parameters_move_as_pairs_of_real_ones():
    x = jnp.asarray([1.0 + 2.0j, -0.5 + 0.1j])
    pair = jnp.stack([x.real, x.imag])
    state, pair_state = PLAIN.init(x), PLAIN.init(pair)
    for _ in range(4):
        x, state = mover(PLAIN)(2 * x, state, x)
        pair, pair_state = mover(PLAIN)(2 * pair, pair_state, pair)
    np.testing.assert_allclose(jnp.stack([x.real, x.imag]), pair, rtol=1e-5)
    assert 0 < scale(state) == pytest.approx(float(scale(pair_state)), rel=1e-5)


@pytest.mark.long
def test_dtypes_may_be_mixed_and_wide_parameters_keep_no_residual():
    params = {"first": mlp(dtype=jnp.bfloat16)["first"], "last": mlp()["last"]}
    optimizer = mechanize(optax.adamw(1.0))
    state, start = optimizer.init(params), train_loss(params)
    assert [leaf.shape for leaf in jax.tree.leaves(state.residual)] == [(64, 32)]
    step = stepper(optimizer, donate_argnums=(0, 1))
    trained, state = train(params, optimizer, 60, state=state, step=step)
    assert step._cache_size() == 1
    assert {name: p.dtype for name, p in trained.items()} == {"first": jnp.bfloat16, "last": jnp.float32}
    assert {name: d.dtype for name, d in state.delta.items()} == {"first": jnp.float32, "last": jnp.float32}
    assert train_loss(trained) < start / 1.5
    assert scale(state) > 0
    assert jax.tree.leaves(optimizer.init(mlp()).residual) == []


def test_a_write_to_the_parameters_between_steps_survives():
    """The next step starts from what was written: it adds an update, and never sets the parameters to x_1 + S Delta."""
    params, state = learned(PLAIN)
    written = jax.tree.map(lambda p: p + 1.0, params)
    moved, after = stepper(PLAIN)(written, state, *batch(20))
    for name, p in written.items():
        expected = p + scale(after) * after.delta[name] - scale(state) * state.delta[name]
        np.testing.assert_allclose(moved[name], expected, rtol=1e-5, atol=1e-5)


def test_delta_starts_at_zero_also_where_a_parameter_is_not_a_number():
    params = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf, 0.0])
    for init in (PLAIN.init, jax.jit(PLAIN.init)):
        assert not init(params).delta.any()
