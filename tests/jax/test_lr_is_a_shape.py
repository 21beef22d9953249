"""Only the shape of the learning rate matters: its size is divided out, and S settles as the schedule falls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import mechanize, scale
from tests.jax.task import mlp, mover, same_bits, train, train_loss

TARGET = jnp.asarray([3.0, -1.0, 2.0])


def gradient_of(x):
    return 2 * (x - TARGET)


def run(optimizer, factors, *, x=None, state=None):
    """One jitted step per factor on the gradient. Returns the parameters and the state."""
    x = jnp.ones(3) if x is None else x
    state = optimizer.init(x) if state is None else state
    for factor in factors:
        x, state = mover(optimizer)(factor * gradient_of(x), state, x)
    return x, state


@pytest.mark.long
def test_learning_rates_a_power_of_two_apart_give_the_same_bits():
    """Where dividing by the peak is exact."""
    ends = [
        train(mlp(hidden=4), mechanize(optax.adamw(lr, weight_decay=0.1), peak_lr=lr), 20)[0]
        for lr in (1.0, 2.0**-20, 2.0**10)
    ]
    assert same_bits(ends[1], ends[0])
    assert same_bits(ends[2], ends[0])


@pytest.mark.long
def test_every_learning_rate_gives_the_same_loss():
    def loss_at(peak):
        schedule = optax.cosine_decay_schedule(peak, 100)
        optimizer = mechanize(optax.adamw(schedule), peak_lr=peak, schedule=schedule)
        return train_loss(train(mlp(hidden=4), optimizer, 100)[0])

    expected = loss_at(1.0)
    assert expected < 0.75 * train_loss(mlp(hidden=4))
    for peak in (1e-6, 1e3):
        assert loss_at(peak) == pytest.approx(expected, rel=0.02)


def course(count):
    """A learning rate that starts at 0, rises, falls to 0, stays there, and falls on."""
    return jnp.interp(count, jnp.asarray([0.0, 10.0, 20.0, 24.0, 60.0]), jnp.asarray([0.0, 1.0, 0.0, 0.0, -1.0]))


@functools.cache
def on_its_course():
    return mechanize(optax.sgd(course), schedule=course)


@pytest.mark.long
def test_a_schedule_that_starts_at_zero_is_learned_from_once_it_rises():
    x, state = run(on_its_course(), [1.0])
    assert same_bits(x, jnp.ones(3))
    x, state = run(on_its_course(), [1.0] * 14, x=x, state=state)
    assert scale(state) > 0
    assert jnp.linalg.norm(x - TARGET) < 0.5 * jnp.linalg.norm(1 - TARGET)


@pytest.mark.parametrize("bad", [jnp.nan, 0.0])
def test_where_a_schedule_is_zero_nothing_moves_also_after_steps_without_feedback(bad):
    """Such steps count for the base, so they have to count for the tuner's place in the schedule."""
    x, state = run(on_its_course(), [1.0] * 12 + [bad, 1.0, bad, bad, 1.0, bad, 1.0, bad])
    assert scale(state) > 0
    later, after = run(on_its_course(), [1.0] * 4, x=x, state=state)
    assert scale(after) == scale(state)
    assert same_bits(later, x)


@pytest.mark.long
def test_where_a_schedule_falls_below_zero_the_scale_stays_and_the_base_steps_as_it_is_told():
    x, state = run(on_its_course(), [1.0] * 25)
    for count in range(25, 60):
        expected = x - float(scale(state)) * course(count) * gradient_of(x)
        x, after = run(on_its_course(), [1.0], x=x, state=state)
        assert scale(after) == scale(state) > 0
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-7)  # one of them comes near 0
        state = after


@pytest.mark.long
@pytest.mark.parametrize("lr", [0.0, -1.0])
def test_a_learning_rate_that_is_not_positive_from_the_first_step_moves_nothing(lr):
    for schedule in (optax.constant_schedule(lr), None) if lr == 0 else (optax.constant_schedule(lr),):
        x, state = run(mechanize(optax.adamw(lr), schedule=schedule), [1.0] * 5)
        assert same_bits(x, jnp.ones(3))
        assert scale(state) == 0


@pytest.mark.long
def test_a_learning_rate_of_zero_moves_nothing_where_delta_is_older_than_the_first_feedback():
    """Weight decay moves Delta on a step without a gradient, before anything was learned."""
    schedule = optax.piecewise_constant_schedule(1.0, {1: 0.0})
    optimizer = mechanize(optax.adamw(schedule, weight_decay=0.1), schedule=schedule)
    x, state = run(optimizer, [0.0])
    assert (state.delta != 0).all()
    later, after = run(optimizer, [1.0] * 3, x=x, state=state)
    assert same_bits(later, x)
    assert scale(after) == 0


SCHEDULES = {
    "warm-up and cosine": (optax.warmup_cosine_decay_schedule(0.0, 3e-4, 137, 1000), 3e-4),
    "a long warm-up": (optax.warmup_cosine_decay_schedule(0.0, 0.02, 123_456, 1_000_000), 0.02),
    "constant": (optax.constant_schedule(0.1), 0.1),
    "restarts that rise": (
        optax.join_schedules([optax.cosine_decay_schedule(peak, 100) for peak in (0.1, 0.2, 0.3)], [100, 200]),
        0.3,
    ),
    "never above 0": (optax.constant_schedule(-1.0), 1.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_peak_is_looked_up_in_the_schedule(name):
    schedule, peak = SCHEDULES[name]
    state = mechanize(optax.sgd(schedule), schedule=schedule).init(jnp.ones(2))
    assert float(state.peak_lr) == pytest.approx(peak, rel=1e-3)


@pytest.mark.long
def test_the_peak_is_read_from_injected_hyperparameters():
    base = optax.inject_hyperparams(optax.adamw)(learning_rate=3e-4)
    injected, given = mechanize(base), mechanize(optax.adamw(3e-4), peak_lr=3e-4)
    (params, state), (expected, other) = (train(mlp(hidden=4), each, 5) for each in (injected, given))
    assert float(state.peak_lr) == float(other.peak_lr) == pytest.approx(3e-4)
    assert float(scale(state)) == pytest.approx(float(scale(other)), rel=1e-3)
    assert train_loss(params) == pytest.approx(train_loss(expected), rel=1e-3)


def test_a_schedule_that_is_missing_or_another_than_the_peak_says_is_told():
    schedule = optax.cosine_decay_schedule(3e-4, 100)
    for base in (optax.adamw(schedule), optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)):
        with pytest.warns(
            UserWarning, match=r"has a schedule that mechanize was not given.* mechanize\(base, schedule=schedule\)"
        ):
            mechanize(base).init(jnp.ones(2))
        mechanize(base, peak_lr=3e-4).init(jnp.ones(2))  # it may be left out
    for peak in (1.0, np.asarray(1.0), jnp.ones(())):
        with pytest.warns(UserWarning, match=r"peaks at 0\.0003, and peak_lr is 1"):
            mechanize(optax.adamw(schedule), schedule=schedule, peak_lr=peak)


def test_under_jit_the_peak_is_the_same_number():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 137, 1000)

    def peak(x):
        return mechanize(optax.sgd(schedule), schedule=schedule).init(x).peak_lr

    assert jax.jit(peak)(jnp.ones(2)) == peak(jnp.ones(2))
