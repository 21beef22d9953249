"""Half-precision parameters train, also where Optax's mechanize stands still."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from mechanic.jax import freeze, mechanize, scale
from mechanic.jax.rounding import update_towards, value_of
from tests.jax.task import mlp, same_bits, train, train_loss

HALF = [jnp.bfloat16, jnp.float16]


def every_usable_half(dtype):
    """All but the largest, which a step may take to infinity, and those whose residual XLA flushes as subnormal."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide = np.abs(numbers.astype(np.float32))
    return jnp.asarray(numbers[(wide < 0.5 * float(jnp.finfo(dtype).max)) & ((wide == 0) | (wide > 1e-30))])


@pytest.mark.parametrize("dtype", HALF)
def test_steps_below_the_last_bit_add_up(dtype):
    """A hundredth of the last bit, 1000 times; added to the parameter itself it would move nothing."""

    @jax.jit
    def step(param, residual, size):
        update, residual = update_towards(value_of(param, residual) + size, param)
        return optax.apply_updates(param, update), residual

    param, residual = jnp.ones(3, dtype), jnp.zeros(3, jnp.bfloat16)
    size = 0.01 * float(jnp.finfo(dtype).eps)
    for _ in range(1000):
        param, residual = step(param, residual, size)
    moved = np.asarray(value_of(param, residual)) - 1
    np.testing.assert_allclose(moved, 1000 * size, rtol=0.02)


@pytest.mark.parametrize("dtype", HALF)
def test_what_is_kept_fits_every_number_there_is(dtype):
    """Also zeros and subnormals: after a step the residual is not taken for somebody else's write."""
    params = every_usable_half(dtype)
    jitter = np.random.default_rng(0).uniform(-0.3, 0.3, len(params)).astype(np.float32)
    target = params.astype(jnp.float32) * (1 + jitter)

    @jax.jit
    def step(params, target):
        update, residual = update_towards(target, params)
        moved = optax.apply_updates(params, update)
        return moved, residual, value_of(moved, residual)

    moved, residual, value = step(params, target)
    error = np.abs(np.asarray(value) - np.asarray(target))
    last_bit = np.asarray(jnp.nextafter(jnp.abs(moved), jnp.asarray(jnp.inf, dtype)) - jnp.abs(moved), np.float32)
    assert moved.dtype == dtype
    assert residual.dtype == jnp.bfloat16
    assert (error <= last_bit / 256).all()


def test_a_parameter_that_others_have_written_is_taken_as_it_stands():
    param, residual = jnp.asarray([1.0, 1.0], jnp.bfloat16), jnp.asarray([0.002, 0.002], jnp.bfloat16)
    param = param.at[1].set(1.5)
    np.testing.assert_allclose(value_of(param, residual), [1.002, 1.502], atol=1e-4)  # still fits: a write unseen
    np.testing.assert_array_equal(value_of(param.at[1].set(0.25), residual)[1], 0.25)


@functools.cache
def end_of_training(dtype):
    """The loss and S."""
    schedule = optax.cosine_decay_schedule(1.0, 300)
    params, state = train(mlp(16, dtype), mechanize(optax.adamw(schedule), schedule=schedule), 300)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(params))
    return train_loss(params), float(scale(state))


@pytest.mark.long
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_ends_where_float32_does(dtype):
    (loss, s), (wide_loss, wide_s) = end_of_training(dtype), end_of_training(jnp.float32)
    assert loss == pytest.approx(wide_loss, rel=0.25, abs=0.01)
    assert s == pytest.approx(wide_s, rel=0.25)


@pytest.mark.long
def test_two_steps_in_one_program_are_two_steps():
    """Between them XLA may keep a parameter in more bits than it has.

    S is frozen here, since XLA rounds the sums differently in two programs.
    """
    optimizer, params = mechanize(optax.sgd(1.0)), jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16)

    def once(carry):
        params, state = carry
        updates, state = optimizer.update(jnp.cos(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = once(once((params, optimizer.init(params))))
    apart = start = params, freeze(state)
    for _ in range(6):
        apart = jax.jit(once)(apart)
    thrice = jax.jit(lambda carry: once(once(once(carry))))
    assert same_bits(thrice(thrice(start)), apart)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lr", "dtype", "width"),
    [(1e-4, jnp.float32, 32), (1e-3, jnp.bfloat16, 8), (1.0, jnp.float16, 32)],
    ids=["float32, sgd at 1e-4", "bfloat16, small, sgd at 1e-3", "float16, sgd at 1"],
)
def test_it_trains_where_optaxs_mechanize_stands_still(lr, dtype, width):
    """There are no biases, which start at zero, where no step is too small."""

    def loss_after(optimizer):
        return train_loss(train(mlp(hidden=width, dtype=dtype), optimizer, 150)[0])

    start = train_loss(mlp(hidden=width, dtype=dtype))
    theirs = loss_after(optax.contrib.mechanize(optax.sgd(lr)))
    ours = loss_after(mechanize(optax.sgd(lr), peak_lr=lr))
    assert not theirs < 0.95 * start  # nan, in float16
    assert ours < 0.8 * start
