"""Only the shape of the learning rate matters: its size is divided out, and S settles as the schedule falls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import freeze, mechanize, scale
from mechanic.jax.state import find
from tests.jax.task import AROUND, mlp, same_bits, train, train_loss

TARGET = jnp.asarray([3.0, -1.0, 2.0])


def gradient_of(x):
    return 2 * (x - TARGET)


@functools.cache
def stepper(optimizer):
    @jax.jit
    def step(x, state, factor):
        updates, state = optimizer.update(factor * gradient_of(x), state, x)
        return optax.apply_updates(x, updates), state

    return step


def run(optimizer, factors, *, x=None, state=None):
    """One jitted step per factor on the gradient. Returns the parameters and the state."""
    x = jnp.ones(3) if x is None else x
    state = optimizer.init(x) if state is None else state
    for factor in factors:
        x, state = stepper(optimizer)(x, state, factor)
    return x, state


PEAK_BASES = {
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "AdamW": functools.partial(optax.adamw, weight_decay=0.1),
    "Lion": optax.lion,
}


@pytest.mark.parametrize("lr", [2.0**-20, 2.0**10])
@pytest.mark.parametrize("base", PEAK_BASES)
def test_learning_rates_a_power_of_two_apart_give_the_same_bits(base, lr):
    """Where dividing by the peak is exact."""
    ends = [train(mlp(hidden=4), mechanize(PEAK_BASES[base](rate), peak_lr=rate), 20)[0] for rate in (1.0, lr)]
    assert same_bits(*ends)


def test_every_learning_rate_gives_the_same_loss():
    def loss_at(peak):
        schedule = optax.cosine_decay_schedule(peak, 100)
        optimizer = mechanize(optax.adamw(schedule), peak_lr=peak, schedule=schedule)
        return train_loss(train(mlp(hidden=4), optimizer, 100)[0])

    expected = loss_at(1.0)
    assert expected < 0.75 * train_loss(mlp(hidden=4))
    for peak in (1e-6, 3e-4, 1e3):
        assert loss_at(peak) == pytest.approx(expected, rel=0.02)


def down_to_zero(steps):
    schedule = optax.linear_schedule(1.0, 0.0, steps)
    return mechanize(optax.adamw(schedule), schedule=schedule)


@pytest.mark.parametrize("bad", [jnp.nan, 0.0])
def test_at_the_end_of_a_schedule_nothing_moves_also_after_steps_without_feedback(bad):
    """Such steps count for the base, so they have to count for the tuner's place in the schedule."""
    optimizer = down_to_zero(10)
    x, state = run(optimizer, [1.0, 1.0, 1.0, bad, 1.0, bad, bad, 1.0, bad, 1.0])
    assert scale(state) > 0
    later, after = run(optimizer, [1.0] * 3, x=x, state=state)
    assert scale(after) == scale(state)
    assert same_bits(later, x)


@pytest.mark.parametrize("around", AROUND)
def test_every_update_is_counted_as_the_base_counts_it(around):
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    optimizer = AROUND[around](mechanize(optax.sgd(schedule), schedule=schedule))
    x, state = run(optimizer, [1.0, 0.0, 1.0, jnp.nan, 1.0])
    mechanic = find(state)[0]
    assert mechanic.count == mechanic.base[1].count == (4 if around == "apply_if_finite" else 5)
    assert mechanic.count.dtype == jnp.int32
    _, state = run(optimizer, [1.0, 1.0], x=x, state=freeze(state))
    assert find(state)[0].count == mechanic.count + 2


@pytest.mark.parametrize("schedule", [optax.constant_schedule(0.0), None], ids=["named", "not named"])
def test_a_learning_rate_of_zero_from_the_first_step_moves_nothing(schedule):
    x, state = run(mechanize(optax.adamw(0.0), schedule=schedule), [1.0] * 5)
    assert same_bits(x, jnp.ones(3))
    assert scale(state) == 0


def test_a_learning_rate_of_zero_moves_nothing_where_delta_is_older_than_the_first_feedback():
    """Weight decay moves Delta on a step without a gradient, before anything was learned."""
    schedule = optax.piecewise_constant_schedule(1.0, {1: 0.0})
    optimizer = mechanize(optax.adamw(schedule, weight_decay=0.1), schedule=schedule)
    x, state = run(optimizer, [0.0])
    assert (state.delta != 0).all()
    later, after = run(optimizer, [1.0] * 3, x=x, state=state)
    assert same_bits(later, x)
    assert scale(after) == 0


def test_a_schedule_that_starts_at_zero_is_learned_from_once_it_rises():
    schedule = optax.linear_schedule(0.0, 1.0, 10)
    optimizer = mechanize(optax.sgd(schedule), schedule=schedule)
    x, state = run(optimizer, [1.0])
    assert same_bits(x, jnp.ones(3))
    x, state = run(optimizer, [1.0] * 30, x=x, state=state)
    assert scale(state) > 0
    assert jnp.linalg.norm(x - TARGET) < 0.5 * jnp.linalg.norm(1 - TARGET)


def test_where_a_schedule_falls_below_zero_the_scale_stays_and_the_base_steps_as_it_is_told():
    def schedule(count):
        return 1 - count / 20

    optimizer = mechanize(optax.sgd(schedule), schedule=schedule)
    x, state = run(optimizer, [1.0] * 21)
    for count in range(21, 60):
        expected = x - float(scale(state)) * schedule(count) * gradient_of(x)
        x, after = run(optimizer, [1.0], x=x, state=state)
        assert scale(after) == scale(state) > 0
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-7)  # one of them comes near 0
        state = after


def test_a_negative_learning_rate_from_the_first_step_moves_nothing():
    x, state = run(mechanize(optax.sgd(-1.0), schedule=optax.constant_schedule(-1.0)), [1.0] * 5)
    assert scale(state) == 0
    assert same_bits(x, jnp.ones(3))
