"""Schedules: the factor on the learning rate as a function of the share of the steps that is done."""

from __future__ import annotations

import math
from collections.abc import Callable


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


def inverse_root(share: float) -> Callable[[float], float]:
    return lambda done: done / share if done < share else (share / done) ** 0.5
