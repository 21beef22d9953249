"""Flax NNX, with a checkpoint of Orbax in the middle: resuming continues bit for bit."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits

from mechanic.jax import mechanize, scale

STEPS = 200
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1.0, 30, STEPS)
OPTIMIZER = mechanize(optax.adamw(SCHEDULE), schedule=SCHEDULE)


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 32, rngs=rngs)
        self.last = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(images)))


def build() -> tuple[Classifier, nnx.Optimizer]:
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def loss_of(model: Classifier, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@nnx.jit
def step(model: Classifier, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> None:
    optimizer.update(model, nnx.grad(loss_of)(model, images, labels))


def train(model: Classifier, optimizer: nnx.Optimizer, steps: range) -> float:
    """Returns the loss over all the data."""
    images, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(images / 16, jnp.float32), jnp.asarray(labels)
    for t in steps:
        rows = jax.random.randint(jax.random.key(t), (64,), 0, len(labels))
        step(model, optimizer, images[rows], labels[rows])
    return float(loss_of(model, images, labels))


def save(path: Path, model: Classifier, optimizer: nnx.Optimizer) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.to_pure_dict(nnx.state((model, optimizer))))


def restore(path: Path, model: Classifier, optimizer: nnx.Optimizer) -> None:
    state = nnx.state((model, optimizer))
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.replace_by_pure_dict(state, checkpointer.restore(path, nnx.to_pure_dict(state)))
    nnx.update((model, optimizer), state)


def main() -> float:
    """Returns the final loss."""
    model, optimizer = build()
    train(model, optimizer, range(STEPS // 2))
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "half", model, optimizer)
        model, optimizer = build()
        restore(Path(folder) / "half", model, optimizer)
    loss = train(model, optimizer, range(STEPS // 2, STEPS))
    print(
        f"final loss {loss:.4f} at a learned scale of {scale(optimizer.opt_state)[...]:.2g}, "
        f"resumed from a checkpoint at step {STEPS // 2}"
    )
    return loss


if __name__ == "__main__":
    main()
