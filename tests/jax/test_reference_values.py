"""Figures that known-good runs reached, so that a change for the worse is seen: those of mechanic.torch."""

import statistics
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic import TunerConfig
from mechanic.jax import mechanize, scale
from tests.jax.task import batch, digits, loss_of, mlp

ABSOLUTE_1E_6 = replace(TunerConfig.paper(), s_init=1e-6, guard=True)
RELATIVE = replace(TunerConfig.paper(), s_init=0.01, relative_start=True, guard=True)


def run(params, loss, inputs, config, base=optax.sgd):
    """A step per input under Mechanic; returns the parameters, and the loss and S of every step."""
    params, *courses = jax.jit(lambda params, inputs: course(params, loss, inputs, config, base))(params, inputs)
    return params, *map(np.asarray, courses)


def course(params, loss, inputs, config, base=optax.sgd):
    optimizer = mechanize(base(1.0), config=config)

    def step(carry, given):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, given)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), (value, scale(state))

    (params, _), courses = jax.lax.scan(step, (params, optimizer.init(params)), inputs)
    return params, *courses


@pytest.mark.parametrize(
    ("config", "after_500", "after_2000", "half_by"),
    [
        (TunerConfig.paper(), 1.7e-2, 1.0e-3, (30, 60)),
        (ABSOLUTE_1E_6, 8.7e-3, 2.4e-4, (15, 40)),
        (RELATIVE, 1.7e-4, 6e-5, (1, 15)),
        (TunerConfig(), 1.6e-7, 1e-20, (1, 40)),
    ],
    ids=["paper", "absolute 1e-6", "relative", "default"],
)
def test_quadratic(config, after_500, after_2000, half_by):
    """20 dimensions, eigenvalues from 1/100 to 1, started at all ones: loss as a fraction of its start."""
    with jax.enable_x64(True):
        eigenvalues = jnp.logspace(-2, 0, 20)
        _, losses, scales = run(jnp.ones(20), lambda x, _: jnp.sum(eigenvalues * x * x), jnp.arange(2001), config)
    assert losses[500] / losses[0] <= 1.1 * after_500
    assert losses[2000] / losses[0] <= 1.1 * after_2000
    assert scales[2] > 0
    assert half_by[0] <= 1 + np.argmax(scales > scales[-1] / 2) <= half_by[1]


def test_a_quadratic_stays_solved_at_a_constant_rate():
    """AdamW for 8,000 steps. If S kept changing as much as at first, the loss would come back to 5e-3 of its start."""
    with jax.enable_x64(True):
        eigenvalues = jnp.logspace(-2, 0, 20)
        given = jnp.ones(20), lambda x, _: jnp.sum(eigenvalues * x * x), jnp.arange(8000)
        _, losses, _ = run(*given, TunerConfig(), optax.adamw)
    losses = losses / losses[0]
    assert max(losses[np.argmin(losses) :]) <= 1e-4
    assert statistics.median(losses[-1000:]) <= 1e-7


@pytest.mark.parametrize(
    ("config", "splits", "train_loss"),
    [(TunerConfig.paper(), 2, 0.082), (ABSOLUTE_1E_6, 2, 0.053), (RELATIVE, 2, 0.02), (TunerConfig(), 256, 0.0125)],
    ids=["paper", "absolute 1e-6", "relative", "default"],
)
def test_logistic_regression_on_digits(config, splits, train_loss):
    """Standardised pixels; the median over splits. With the defaults many end on a bad batch, so it takes more."""
    losses, accuracies = logistic_regressions(config, splits)
    assert statistics.median(losses) <= train_loss
    assert statistics.median(accuracies) >= 0.95


def logistic_regressions(config, splits):
    """Train losses and test accuracies after 800 steps on batches of 32, in float32; a number of each per split."""
    images, labels = digits()
    images = jnp.asarray((images - images.mean(0)) / (images.std(0) + 1e-8))
    labels = jnp.asarray(labels)

    def loss(params, rows):
        logits = images[rows] @ params["weight"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows]).mean()

    def one(start, train, test, batches):
        params, _, _ = course(start, loss, batches, config)
        predicted = jnp.argmax(images[test] @ params["weight"] + params["bias"], -1)
        return loss(params, train), (predicted == labels[test]).mean()

    given = [split(np.random.default_rng(seed), len(labels)) for seed in range(splits)]
    return map(np.asarray, jax.jit(jax.vmap(one))(*jax.tree.map(lambda *leaves: jnp.stack(leaves), *given)))


def split(rng, count):
    """Where one starts, its rows to train and to test on, and its batches."""
    order = rng.permutation(count)
    start = {"weight": rng.uniform(-1 / 8, 1 / 8, (64, 10)), "bias": rng.uniform(-1 / 8, 1 / 8, 10)}
    start = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), start)
    train, test = order[:1400], order[1400:]
    return start, train, test, train[rng.integers(0, 1400, (800, 32))]


@pytest.mark.parametrize(
    ("base", "tolerance"), [(optax.lion(1.0), 0.0), (optax.adamw(1.0, eps=1e-16), 1e-6)], ids=["Lion", "AdamW"]
)
def test_scaling_the_loss_does_not_change_the_scale(base, tolerance):
    """Of a base that normalises its gradients."""
    with jax.enable_x64(True):
        courses = []
        for factor in (1.0, 2.0**13):
            optimizer, params = mechanize(base), mlp(hidden=4, dtype=jnp.float64)

            @jax.jit
            def step(params, state, images, labels, optimizer=optimizer, factor=factor):
                grads = jax.grad(lambda p: factor * loss_of(p, images, labels))(params)
                updates, state = optimizer.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            state, course = optimizer.init(params), []
            for t in range(30):
                params, state = step(params, state, *batch(t))
                course.append(float(scale(state)))
            courses.append(course)
    assert courses[0] == pytest.approx(courses[1], rel=tolerance, abs=0)
    assert courses[0][-1] > 0
