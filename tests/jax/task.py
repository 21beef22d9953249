"""The small real task of task.py in JAX: scikit-learn's digits and an MLP."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from benchmarks.speed import jax_step
from mechanic.jax import mechanize

PLAIN = mechanize(optax.sgd(1.0))
LABELS = {"first": "a", "last": "b"}
AROUND = {  # what may stand around Mechanic
    "nothing": lambda inner: inner,
    "chain": lambda inner: optax.chain(optax.clip_by_global_norm(1.0), inner),
    "MultiSteps": lambda inner: optax.MultiSteps(inner, every_k_schedule=1).gradient_transformation(),
    "masked": lambda inner: optax.masked(inner, True),
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 3),
    "partition": lambda inner: optax.partition({"a": inner}, lambda params: jax.tree.map(lambda _: "a", params)),
}


@functools.cache
def digits():
    images, labels = load_digits(return_X_y=True)
    return np.asarray(images / 16, np.float32), labels


def mlp(hidden=32, dtype=jnp.float32, seed=0):
    """Two weights and no more: in these tests the time goes into compiling, and that grows with the leaves."""
    rng = np.random.default_rng(seed)
    shapes = {"first": (64, hidden), "last": (hidden, 10)}
    return {name: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, dtype) for name, shape in shapes.items()}


def loss_of(params, images, labels):
    """In the parameters' own dtype, but for the loss itself."""
    hidden = jax.nn.relu(images.astype(params["first"].dtype) @ params["first"]).astype(params["last"].dtype)
    logits = (hidden @ params["last"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


gradient_of = jax.jit(jax.grad(loss_of))


def batch(step, size=32):
    images, labels = digits()
    chosen = np.random.default_rng(step).integers(0, len(labels), size)
    return images[chosen], labels[chosen]


def train_loss(params):
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return float(jax.jit(loss_of)(wide, *digits()))


@functools.cache
def stepper(optimizer, **jit_options):
    """One jitted step: (params, state, images, labels) -> (params, state)."""

    def step(params, state, images, labels):
        grads = jax.grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, **jit_options)


@functools.cache
def mover(optimizer, **jit_options):
    """One jitted step on given gradients: (grads, state, params, **extra) -> (params, state)."""

    def step(grads, state, params, **extra):
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, **jit_options)


def train(params, optimizer, steps, *, state=None, first=0, step=None):
    """The plain training loop; returns the parameters and the state."""
    state = optimizer.init(params) if state is None else state
    step = step or stepper(optimizer)
    for t in range(first, first + steps):
        params, state = step(params, state, *batch(t))
    return params, state


@functools.cache
def learned(optimizer, steps=20):
    """The parameters and the state after some steps."""
    return train(mlp(hidden=4), optimizer, steps)


@functools.cache
def cost_of(name):
    """Of a step of this name on ten matrices, as the compiler counts it, per parameter."""
    return jax_step.cost_of(jax_step.build(name, side=100))


def avals(tree):
    """The dtypes and shapes."""
    return jax.tree.map(jax.typeof, tree)


def assert_close(ours, expected, **tolerance):
    """Leaf by leaf."""
    for one, other in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


def same_bits(a, b):
    def bits(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf.dtype, np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        bits(x) == bits(y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
