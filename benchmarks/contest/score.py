"""AlgoPerf's performance profile: how fast a method reaches a target, next to the fastest, over all tasks.

Plain functions of numbers. A time is infinite where the target was not reached.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

FARTHEST = 4.0  # τ: a method that takes so many times as long as the fastest counts as one that did not arrive
RESAMPLES = 10_000


class Interval(NamedTuple):
    """A mean, and where 95 % of the means of resampled tasks lie."""

    mean: float
    low: float
    high: float


def target(best: float, slack: float, initial: float | None = None) -> float:
    """A loss that is worse than the best by a share of it; with ``initial``, by a share of the way down to it."""
    return best + slack * (abs(best) if initial is None else initial - best)


def time_to(target: float, times: Sequence[float], losses: Sequence[float | None]) -> float:
    """When the loss first was at or below the target, as evaluated."""
    for time, loss in zip(times, losses, strict=False):
        if loss is not None and loss <= target:
            return time
    return math.inf


def over_seeds(times: Sequence[float]) -> float:
    """The median, as AlgoPerf has it: a target is reached where most of the seeds reach it."""
    return statistics.median_high(times) if times else math.inf


def ratios(times: Mapping[str, float]) -> dict[str, float]:
    """On one task, by method: how many times as long as the fastest."""
    fastest = min(times.values())
    if not math.isfinite(fastest):
        return dict.fromkeys(times, math.inf)
    return {method: time / fastest if fastest else (1.0 if time == 0 else math.inf) for method, time in times.items()}


def area(ratio: float, farthest: float = FARTHEST) -> float:
    """One task's part of the area under the profile, between 0 and 1: 1 for the fastest, 0 from ``farthest`` on.

    The profile is the share of tasks with a ratio of at most τ, and a task is part of it from its ratio on. So the area
    between τ = 1 and the farthest is the mean of these parts.
    """
    return max(0.0, (farthest - ratio) / (farthest - 1))


def profile(ratios: Sequence[float], levels: Sequence[float]) -> list[float]:
    """The share of the tasks within every level of τ."""
    return [sum(ratio <= level for ratio in ratios) / len(ratios) for level in levels]


def areas(times: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """By method, a part per task; the methods are those of the first task."""
    by_task = [ratios(of_task) for of_task in times]
    return {method: [area(of_task[method]) for of_task in by_task] for method in (times[0] if times else ())}


def interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Of the mean, by a bootstrap over the tasks; the same tasks are drawn for all that have as many."""
    if not values:
        return Interval(math.nan, math.nan, math.nan)
    numbers = np.asarray(values, dtype=float)
    low, high = np.quantile(numbers[_drawn(len(numbers), seed)].mean(axis=1), (0.025, 0.975))
    return Interval(float(numbers.mean()), float(low), float(high))


@functools.cache
def _drawn(count: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def difference(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Interval:
    """Of the mean difference, task by task."""
    return interval([one - other for one, other in zip(values, others, strict=True)], seed)
