"""The transformations that the campaign runs with in JAX, each with its jitted steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mechanic import TunerConfig
from mechanic.jax import mechanize

LABELS = {"first": "a", "last": "b"}


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    name: str
    make: Callable[..., optax.GradientTransformation]  # from a learning rate or schedule
    dtype: Any = jnp.float32
    x64: bool = False
    peak_lr: float = 1.0
    labels: dict[str, str] | None = None
    schedule: optax.Schedule | None = None
    config: TunerConfig = TunerConfig()  # noqa: RUF009
    delta: str | None = None

    @functools.cached_property
    def base(self):
        return self.make(self.peak_lr if self.schedule is None else self.schedule)

    @functools.cached_property
    def optimizer(self):
        names = ("peak_lr", "labels", "schedule", "config", "delta")
        return mechanize(self.base, **{name: getattr(self, name) for name in names})

    @functools.cached_property
    def init(self):
        return jax.jit(self.optimizer.init)

    @functools.cached_property
    def step(self):
        """(params, state, grads, observed) -> (params, state)"""
        return jax.jit(self.step_without_jit)

    def step_without_jit(self, params, state, grads, observed=None):
        updates, state = self.optimizer.update(grads, state, params, observed=observed)
        return optax.apply_updates(params, updates), state

    @property
    def tuners(self):
        """Which parameters every tuner has."""
        if self.labels is None:
            return {"default": set(LABELS)}
        return {tuner: {name for name, of in self.labels.items() if of == tuner} for tuner in self.labels.values()}

    @property
    def rows(self):
        """The same in the order of the tuners' rows, by name."""
        return [parts for _, parts in sorted(self.tuners.items())]


def falls_to_zero(t):
    return jnp.maximum(0.0, 1 - t / 16)


def falls_below_zero(t):
    return 1 - t / 16


SETUPS = [
    Setup("sgd", optax.sgd),
    Setup("adam, float64, labels", optax.adam, jnp.float64, x64=True, labels=LABELS),
    Setup("adamw, schedule to 0", optax.adamw, schedule=falls_to_zero),
    Setup(
        "sgd momentum, schedule below 0",
        lambda lr: optax.sgd(lr, momentum=0.9),
        schedule=falls_below_zero,
        labels=LABELS,
    ),
    Setup("lion, bfloat16", optax.lion, jnp.bfloat16),
    Setup("rmsprop, float16, paper", optax.rmsprop, jnp.float16, peak_lr=3e-4, config=TunerConfig.paper()),
    Setup("adam, delta int8", optax.adam, labels=LABELS, delta="int8"),
    Setup("adamw, bfloat16, delta bfloat16", optax.adamw, jnp.bfloat16, schedule=falls_to_zero, delta="bfloat16"),
    Setup("nadam, complex64", optax.nadam, jnp.complex64, config=TunerConfig(forgetting=0.0)),
]
