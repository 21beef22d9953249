"""Figures that known-good runs reached, so that a change for the worse is seen: those of mechanic.torch.

Those of other configs are the tuner's, which both share and test_follows_oracle.py follows.
"""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import mechanize, scale
from tests.jax.task import digits

pytestmark = pytest.mark.long


def course(params, loss, inputs, base=optax.sgd):
    """A step per input under Mechanic; the parameters, and the loss and S of every step."""
    optimizer = mechanize(base(1.0))

    def step(carry, given):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, given)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), (value, scale(state))

    (params, _), courses = jax.lax.scan(step, (params, optimizer.init(params)), inputs)
    return params, *courses


def on_a_quadratic(base, steps):
    """20 dimensions, eigenvalues from 1/100 to 1, started at all ones: the loss over its start, and S."""
    with jax.enable_x64(True):
        eigenvalues = jnp.logspace(-2, 0, 20)
        run = jax.jit(lambda x: course(x, lambda x, _: jnp.sum(eigenvalues * x * x), jnp.arange(steps), base))
        _, losses, scales = map(np.asarray, run(jnp.ones(20)))
    return losses / losses[0], scales


def test_quadratic():
    losses, scales = on_a_quadratic(optax.sgd, 2001)
    assert losses[500] <= 1.1 * 1.6e-7
    assert losses[2000] <= 1.1 * 1e-20
    assert scales[2] > 0
    assert np.argmax(scales > scales[-1] / 2) < 40


def test_a_quadratic_stays_solved_at_a_constant_rate():
    """AdamW for 8,000 steps. If S kept changing as much as at first, the loss would come back to 5e-3 of its start."""
    losses, _ = on_a_quadratic(optax.adamw, 8000)
    assert max(losses[np.argmin(losses) :]) <= 1e-4
    assert statistics.median(losses[-1000:]) <= 1e-7


def test_logistic_regression_on_digits():
    """800 steps on batches of 32, in float32, of standardised pixels; the median over 128 splits.

    Many end on a bad batch, so it takes more than a few.
    """
    images, labels = digits()
    images = jnp.asarray((images - images.mean(0)) / (images.std(0) + 1e-8))
    labels = jnp.asarray(labels)

    def loss(params, rows):
        logits = images[rows] @ params["weight"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows]).mean()

    def one(start, train, test, batches):
        params, _, _ = course(start, loss, batches)
        predicted = jnp.argmax(images[test] @ params["weight"] + params["bias"], -1)
        return loss(params, train), (predicted == labels[test]).mean()

    given = [split(np.random.default_rng(seed), len(labels)) for seed in range(128)]
    losses, accuracies = jax.jit(jax.vmap(one))(*jax.tree.map(lambda *leaves: np.stack(leaves), *given))
    assert np.median(losses) <= 0.0125
    assert np.median(accuracies) >= 0.95


def split(rng, count):
    """Where one starts, its rows to train and to test on, and its batches."""
    order = rng.permutation(count)
    start = {"weight": rng.uniform(-1 / 8, 1 / 8, (64, 10)), "bias": rng.uniform(-1 / 8, 1 / 8, 10)}
    start = {name: p.astype(np.float32) for name, p in start.items()}
    train, test = order[:1400], order[1400:]
    return start, train, test, train[rng.integers(0, 1400, (800, 32))]
