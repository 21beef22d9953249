"""Optax alone: a scale per layer, a schedule, and after a probe the plain optimizer at what was learned."""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from mechanic.jax import mechanize, release, scales

PROBE, STEPS = 100, 400
LABELS = {"first": "body", "last": "head"}


def loss_of(params, images, labels):
    logits = jax.nn.relu(images @ params["first"]) @ params["last"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(params, optimizer, state, images, labels, key, steps):
    @jax.jit
    def step(carry, key):
        params, state = carry
        rows = jax.random.randint(key, (64,), 0, len(labels))
        grads = jax.grad(loss_of)(params, images[rows], labels[rows])
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), jax.random.split(key, steps))[0]


def main() -> float:
    """Returns the final loss over all the data."""
    images, labels = load_digits(return_X_y=True)
    data = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "first": jax.random.normal(keys[0], (64, 32)) / 8,
        "last": jax.random.normal(keys[1], (32, 10)) / 32**0.5,
    }

    schedule = optax.cosine_decay_schedule(1.0, STEPS)
    base = optax.adamw(schedule)
    optimizer = mechanize(base, schedule=schedule, labels=LABELS)
    params, state = train(params, optimizer, optimizer.init(params), *data, keys[2], PROBE)
    print("learned:", ", ".join(f"{name} at {float(s):.2g}" for name, s in scales(state).items()))

    plain, plain_state = release(base, state, labels=LABELS)  # the schedule goes on where it stood
    params, _ = train(params, plain, plain_state, *data, keys[3], STEPS - PROBE)
    loss = float(loss_of(params, *data))
    print(f"final loss {loss:.4f}; after step {PROBE} it was plain AdamW at the learned rates")
    return loss


if __name__ == "__main__":
    main()
