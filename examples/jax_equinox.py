"""Equinox, with bfloat16 parameters, gradient accumulation, and a scale frozen for the last third."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from mechanic.jax import freeze, mechanize, scale

STEPS = 300


def loss_of(model: eqx.nn.MLP, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(images).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> float:
    """Returns the final loss over all the data."""
    images, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(images / 16, jnp.bfloat16), jnp.asarray(labels)
    model = eqx.nn.MLP(64, 10, 32, depth=1, dtype=jnp.bfloat16, key=jax.random.key(0))

    schedule = optax.cosine_decay_schedule(1.0, STEPS // 2)
    optimizer = optax.MultiSteps(mechanize(optax.adamw(schedule), schedule=schedule), every_k_schedule=2)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, key):
        rows = jax.random.randint(key, (32,), 0, len(labels))
        grads = eqx.filter_grad(loss_of)(model, images[rows], labels[rows])
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    for t, key in enumerate(jax.random.split(jax.random.key(1), STEPS)):
        if t == 2 * STEPS // 3:
            state = freeze(state)
            print(f"frozen at a scale of {scale(state):.2g}, without Delta from here on")
        model, state = step(model, state, key)
    loss = float(loss_of(model, images, labels))
    print(f"final loss {loss:.4f} with bfloat16 parameters")
    return loss


if __name__ == "__main__":
    main()
