"""``python -m benchmarks.long_runs``: small problems at a constant learning rate, for 50,000 steps.

What can go wrong there is that the loss comes back up after it has been low. Per problem and base, a record has the
minimum of the loss, its largest value after that minimum, and the median of the last steps, all as shares of the first
loss; for Mechanic, for ``TunerConfig.paper()``, and for the bare base at every learning rate of a grid of decades. JAX
compiles a whole run, which is why this takes minutes and not a day.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.suite.record import ROOT, commit, environment
from mechanic import TunerConfig
from mechanic.jax import mechanize

Array = Any
Loss = Callable[[Array, Array], Array]  # of the parameters and the chosen rows

STEPS, BATCH, LAST = 50_000, 10, 3_000
LRS = tuple(10.0**exponent for exponent in range(-5, 3))
RECORDS = ROOT / "benchmarks" / "records" / "long" / "long.jsonl"
BASES: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "SGD": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "AdamW": functools.partial(optax.adamw, weight_decay=0.01),
    "AdamW, decay 1e-4": functools.partial(optax.adamw, weight_decay=1e-4),
    "Lion": functools.partial(optax.lion, weight_decay=0.0),
}
CONFIGS = {
    "mechanic": TunerConfig(),
    "before calming": TunerConfig(settle=False),  # settling does nothing else where no schedule is given
    "mechanic-paper": TunerConfig.paper(),
}


class Problem(NamedTuple):
    """Where it starts, its loss, and of how many rows; where batches are drawn from them, the gradient is a batch's."""

    start: Array
    loss: Loss
    rows: int
    batches: bool


def logistic(*, noisy: bool) -> Problem:
    """100 points in 10 dimensions that a plane tells apart, full batch: the loss has no minimum.

    ``noisy``: in batches, with every tenth label wrong, so that the gradients stay noisy at the minimum.
    """
    random = np.random.default_rng(0)
    points = random.normal(size=(100, 10))
    points *= np.sign(points @ random.normal(size=10))[:, None]
    if noisy:
        points[::10] *= -1
    points = jnp.asarray(points)

    def loss(x: Array, rows: Array) -> Array:
        return jax.nn.softplus(-(points[rows] @ x)).mean()

    return Problem(0.1 * random.normal(size=10), loss, 100, batches=noisy)


def quadratic(condition: float) -> Problem:
    eigenvalues = jnp.logspace(-np.log10(condition), 0, 20)
    return Problem(np.ones(20), lambda x, rows: (eigenvalues * x * x).sum(), 1, batches=False)


def regression(unknowns: int, noise: float) -> Problem:
    """50 equations, in batches: with 100 unknowns all can be solved, and at the minimum there is no noise."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(50, unknowns)) / unknowns**0.5
    targets = inputs @ random.normal(size=unknowns) + noise * random.normal(size=50)
    inputs, targets = jnp.asarray(inputs), jnp.asarray(targets)

    def loss(x: Array, rows: Array) -> Array:
        return jnp.square(inputs[rows] @ x - targets[rows]).mean()

    return Problem(0.1 * random.normal(size=unknowns), loss, 50, batches=True)


def noisy_network() -> Problem:
    """A network of one hidden layer with enough weights to learn 64 noisy targets by heart, in batches."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(64, 5))
    targets = np.sin(inputs @ random.normal(size=5)) + 0.1 * random.normal(size=64)
    start = random.normal(size=112) * np.repeat([5**-0.5, 0.0, 0.25], [80, 16, 16])
    inputs, targets = jnp.asarray(inputs), jnp.asarray(targets)

    def loss(x: Array, rows: Array) -> Array:
        hidden = jnp.tanh(inputs[rows] @ x[:80].reshape(5, 16) + x[80:96])
        return jnp.square(hidden @ x[96:] - targets[rows]).mean()

    return Problem(start, loss, 64, batches=True)


def factors() -> Problem:
    """A matrix of rank 3 as a product of two factors, full batch."""
    random = np.random.default_rng(0)
    target = jnp.asarray(random.normal(size=(10, 3)) @ random.normal(size=(3, 10)))

    def loss(x: Array, rows: Array) -> Array:
        return jnp.square(x[:30].reshape(10, 3) @ x[30:].reshape(3, 10) - target).mean()

    return Problem(0.3 * random.normal(size=60), loss, 1, batches=False)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "separable logistic": functools.partial(logistic, noisy=False),
    "noisy logistic": functools.partial(logistic, noisy=True),
    "quadratic, condition 100": functools.partial(quadratic, 100.0),
    "quadratic, condition 1e4": functools.partial(quadratic, 1e4),
    "interpolating regression": functools.partial(regression, 100, 0.0),
    "noisy regression": functools.partial(regression, 10, 0.5),
    "noisy network": noisy_network,
    "factors": factors,
}


def losses_of(problem: Problem, optimizer: optax.GradientTransformation, steps: int) -> Array:
    """Of all rows, before every step, as shares of the first one."""
    every_row = jnp.arange(problem.rows)

    def step(carry: Any, key: Array) -> Any:
        x, state = carry
        rows = jax.random.randint(key, (BATCH,), 0, problem.rows) if problem.batches else every_row
        updates, state = optimizer.update(jax.grad(problem.loss)(x, rows), state, x)
        return (optax.apply_updates(x, updates), state), problem.loss(x, every_row)

    start = jnp.asarray(problem.start)
    losses = jax.lax.scan(step, (start, optimizer.init(start)), jax.random.split(jax.random.key(1), steps))[1]
    return losses / losses[0]


def summary(losses: Array) -> dict[str, float | None]:
    """None where the loss was not finite."""
    finite = np.isfinite(losses)
    lowest = int(np.argmin(np.where(finite, losses, np.inf)))
    after = losses[lowest:] if finite.all() else [np.inf]
    found = {"minimum": losses[lowest], "largest_after": np.max(after), "last": np.median(losses[-LAST:])}
    return {name: float(f"{value:.3g}") if np.isfinite(value) else None for name, value in found.items()}


def runs_of(problem: Problem, base: str, steps: int) -> list[dict[str, Any]]:
    """The records of one problem and base."""
    make, found = BASES[base], []
    for name, config in CONFIGS.items():
        losses = jax.jit(lambda config=config: losses_of(problem, mechanize(make(1.0), config=config), steps))()
        found.append({"contender": name, "lr": None, **summary(np.asarray(losses))})
    grid = jax.jit(jax.vmap(lambda lr: losses_of(problem, make(lr), steps)))(jnp.asarray(LRS))
    found += [{"contender": "bare", "lr": lr, **summary(of)} for lr, of in zip(LRS, np.asarray(grid), strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_runs", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="another number: printed and not recorded")
    parser.add_argument("--problem", choices=PROBLEMS, help="this one only: printed and not recorded")
    arguments = parser.parse_args()
    made_by, lines = environment(commit()), []
    made_by["versions"] = {**made_by["versions"], "jax": jax.__version__, "optax": optax.__version__}
    with jax.enable_x64(True):
        for name in [arguments.problem] if arguments.problem else PROBLEMS:
            for base in BASES:
                began = time.monotonic()
                for run in runs_of(PROBLEMS[name](), base, arguments.steps):
                    record = {"problem": name, "base": base, "steps": arguments.steps, **run}
                    lines.append(json.dumps({**record, **made_by}))
                    print(", ".join(f"{value}" for value in record.values()), flush=True)
                print(f"{time.monotonic() - began:.1f} seconds", flush=True)
    if not arguments.problem and arguments.steps == STEPS:
        RECORDS.parent.mkdir(exist_ok=True)
        RECORDS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
