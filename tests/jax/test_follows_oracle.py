"""mechanic.jax follows Algorithm 1 written in NumPy, and mechanic.torch, on softmax regression over the digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from mechanic.jax import freeze, learned_rates, mechanize, release, scale
from mechanic.torch import Mechanic
from tests.shared import oracle
from tests.torch.oracle_task import BASES as IN_TORCH
from tests.torch.oracle_task import CONFIGS, STEPS, gradient, rows, run_mechanic, run_oracle, start, warmup_cosine
from tests.torch.task import digits

RATES = np.array([warmup_cosine(t) for t in range(STEPS)])


def schedule(t):
    """For a step that is traced."""
    return jnp.asarray(RATES)[t]


BASES = {
    "SGD": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "AdamW": functools.partial(optax.adamw, weight_decay=0.1),
    "Lion": functools.partial(optax.lion, weight_decay=0.1),
}


def run_jax(base, config, dtype, *, peak=1.0, steps=STEPS, held_out=lambda t: None):
    """``held_out`` names the batch that is observed on a step, if any."""
    images, labels = (jnp.asarray(array.numpy()) for array in digits(torch.float64))

    def rate(t):
        return peak * schedule(t)

    optimizer = mechanize(base(rate), config=config, schedule=rate)

    @jax.grad
    def gradient_of(weight, chosen):
        logits = images[chosen].astype(dtype) @ weight.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[chosen]).mean()

    @jax.jit
    def step(weight, state, chosen, held_out):
        observed = None if held_out is None else gradient_of(weight, held_out)
        updates, state = optimizer.update(gradient_of(weight, chosen), state, weight, observed=observed)
        return optax.apply_updates(weight, updates), state

    weight = jnp.asarray(start(), dtype)
    state = optimizer.init(weight)
    course = []
    for t in range(steps):
        observed = held_out(t)
        weight, state = step(weight, state, rows(t), None if observed is None else rows(observed))
        course.append((float(scale(state)), np.asarray(weight)))
    return course


def assert_close(course, expected, tolerance):
    assert expected[-1][0] > 0
    for (our_s, our_x), (s, x) in zip(course, expected, strict=True):
        assert our_s == pytest.approx(s, rel=tolerance)
        assert np.linalg.norm(our_x - x) <= tolerance * np.linalg.norm(x)


@pytest.mark.long
@pytest.mark.parametrize("base", BASES)
def test_float64_follows_the_oracle_and_mechanic_torch_for_300_steps(base):
    """At a peak of 1e-3, where dividing by the peak changes something; theirs is 1."""
    with jax.enable_x64(True):
        course = run_jax(BASES[base], None, jnp.float64, peak=1e-3)
    assert_close(course, run_oracle(base), 1e-9)
    _, in_torch, options = IN_TORCH[base]
    assert_close(course, run_mechanic(Mechanic, in_torch, options, None, torch.float64), 1e-9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("base", "config"),
    [("SGD", "paper"), ("AdamW", "two betas"), ("Lion", "nothing forgotten"), ("momentum", "bounds")],
)
def test_it_follows_the_oracle_with_other_configs(base, config):
    ours, _ = CONFIGS[config]
    with jax.enable_x64(True):
        course = run_jax(BASES[base], ours, jnp.float64)
    assert_close(course, run_oracle(base, config), 1e-9)


@pytest.mark.long
def test_observed_gradients_follow_the_oracle_among_steps_without():
    def held_out(t):
        return 1000 + t if t % 3 else None

    reference = oracle.Oracle(IN_TORCH["AdamW"][0](warmup_cosine), start())
    expected = []
    for t in range(100):
        observed = held_out(t)
        reference.step(gradient(reference.x, t), None if observed is None else gradient(reference.x, observed))
        expected.append((reference.scale, reference.x))
    with jax.enable_x64(True):
        course = run_jax(BASES["AdamW"], None, jnp.float64, steps=100, held_out=held_out)
    assert_close(course, expected, 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("base", ["SGD", "AdamW"])
def test_float32_tracks_the_scale_for_100_steps(base):
    expected = run_oracle(base)[:100]
    for (our_s, _), (s, _) in zip(run_jax(BASES[base], None, jnp.float32, steps=100), expected, strict=True):
        assert our_s == pytest.approx(s, rel=1e-3)


def test_the_learned_rate_is_the_mean_of_s_weighted_with_the_schedule_and_is_handed_over():
    eigenvalues, x = np.logspace(-2, 0, 12), np.ones(12)

    def schedule(t):
        return 0.5 + 0.5 * np.cos(np.pi * t / 80)

    def in_jax(t):
        return 0.5 + 0.5 * jnp.cos(jnp.pi * t / 80)

    reference = oracle.Oracle(oracle.SGD(schedule), x)
    optimizer = mechanize(optax.sgd(in_jax), schedule=in_jax)
    with jax.enable_x64(True):
        x = jnp.asarray(x)
        state, update = optimizer.init(x), jax.jit(optimizer.update)
        for _ in range(80):
            updates, state = update(eigenvalues * x, state, x)
            x = optax.apply_updates(x, updates)
            reference.step(eigenvalues * reference.x)
        learned = reference.learned_rate
        assert abs(learned / reference.scale - 1) > 0.05
        assert float(learned_rates(state)["default"]) == pytest.approx(learned, rel=1e-9)
        assert float(scale(freeze(state))) == pytest.approx(learned, rel=1e-9)
        plain, plain_state = release(optax.sgd(1.0), state)
        assert float(plain.update(x, plain_state, x)[0][0] / -x[0]) == pytest.approx(learned, rel=1e-9)


@pytest.mark.parametrize(("bound", "factor"), [("max_lr", 0.1), ("min_lr", 3.0)])
def test_a_run_that_goes_on_with_other_bounds_follows(bound, factor):
    eigenvalues, x = np.logspace(-2, 0, 12), np.ones(12)
    reference = oracle.Oracle(oracle.AdamW(lambda t: 1.0, weight_decay=0.0), x)
    optimizer = mechanize(optax.adamw(1.0, weight_decay=0.0))
    with jax.enable_x64(True):
        x = jnp.asarray(x)
        state = optimizer.init(x)
        for step in range(90):
            if step == 60:
                limit = factor * float(scale(state))
                reference.bounds = (limit, np.inf) if bound == "min_lr" else (0.0, limit)
                optimizer = mechanize(optax.adamw(1.0, weight_decay=0.0), config={bound: limit})
            updates, state = jax.jit(optimizer.update)(eigenvalues * x, state, x)
            x = optax.apply_updates(x, updates)
            reference.step(eigenvalues * reference.x)
            assert float(scale(state)) == pytest.approx(reference.scale, rel=1e-9)
            assert float(learned_rates(state)["default"]) == pytest.approx(reference.learned_rate, rel=1e-9)
            np.testing.assert_allclose(x, reference.x, rtol=1e-9, atol=1e-12)
