"""Schedules: the factor on the learning rate as a function of the share of the steps that is done."""

from __future__ import annotations

import math
from collections.abc import Callable


def at_steps(shape: Callable[[float], float], steps: int) -> Callable[[int], float]:
    """The factor at step 0, 1, ... of so many steps.

    A shape that starts at 0 is asked only between its ends: no step is taken at a learning rate of 0, neither the first
    nor the last, where some optimizers raise.
    """
    if shape(0.0) == 0.0:
        return lambda step: shape((step + 1) / (steps + 1))
    return lambda step: shape(step / steps)


def constant(done: float) -> float:
    return 1.0


def cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def warm_up_cosine(done: float) -> float:
    return done / 0.1 if done < 0.1 else cosine((done - 0.1) / 0.9)


def warm_up_linear(done: float) -> float:
    return done / 0.06 if done < 0.06 else (1 - done) / 0.94


def steps_down(*at: float, factor: float) -> Callable[[float], float]:
    return lambda done: factor ** sum(done >= border for border in at)


def warm_up(share: float, then: Callable[[float], float]) -> Callable[[float], float]:
    return lambda done: done / share if done < share else then((done - share) / (1 - share))


def warm_up_stable_decay(done: float) -> float:
    return done / 0.05 if done < 0.05 else min(1.0, (1 - done) / 0.2)


def one_cycle(done: float) -> float:
    """torch's OneCycleLR with its defaults."""
    first, last = 1 / 25, 1 / 25 / 1e4
    if done < 0.3:
        return 1 - (1 - first) * cosine(done / 0.3)
    return last + (1 - last) * cosine((done - 0.3) / 0.7)
