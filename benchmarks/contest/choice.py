"""How the search's records become one point per method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.contest.methods import METHODS, contender_name
from benchmarks.contest.tasks import SEARCHED, search_name
from benchmarks.suite.record import Run, final, raised

Records = Mapping[Run, dict[str, Any]]


def final_loss(record: dict[str, Any]) -> float:
    """The mean of the last three evaluations on test data; infinite where the run raised or diverged."""
    return math.inf if raised(record) else final(record, "test_loss")


def behind(loss: float, best: float, initial: float) -> float:
    """0 is the best of all points, 1 has learned nothing, diverged or raised."""
    if not math.isfinite(loss):
        return 1.0
    if loss <= best:
        return 0.0
    return min(1.0, (loss - best) / (initial - best)) if initial > best else 1.0


def by_point(records: Records) -> dict[str, list[float]]:
    """How far each point is behind in the mean over the tasks that are complete, by method and number."""
    by_task: dict[str, dict[str, dict[str, Any]]] = {}
    for run, record in records.items():
        by_task.setdefault(run.task, {})[run.contender] = record
    names = {
        method: [contender_name(method, number) for number in range(len(METHODS[method].points()))]
        for method in METHODS
    }
    everyone = {name for of_method in names.values() for name in of_method}
    behinds: dict[str, list[float]] = {name: [] for name in everyone}
    for task in SEARCHED:
        of_task = by_task.get(search_name(task), {})
        if everyone - of_task.keys():
            continue
        losses = {name: final_loss(of_task[name]) for name in everyone}
        starts = [record["curve"]["test_loss"][0] for record in of_task.values() if record["curve"].get("test_loss")]
        initial, best = statistics.median(starts), min(losses.values())
        for name, loss in losses.items():
            behinds[name].append(behind(loss, best, initial))
    if not any(behinds.values()):
        return {}
    return {method: [statistics.mean(behinds[name]) for name in of_method] for method, of_method in names.items()}


def chosen(records: Records) -> dict[str, int]:
    """The number of every method's best point, the authors' among them; empty before a task is complete.

    Every task counts the same, whatever its loss is measured in, and what diverges counts no more than what learns
    nothing. So no single task decides, as it could by a mean of losses, and none is ignored, as it could be by a
    median. The best is that of all methods, so a method is drawn to tasks where others show that more can be had.
    """
    return lowest(by_point(records))


def lowest(behinds: Mapping[str, list[float]]) -> dict[str, int]:
    return {method: of_method.index(min(of_method)) for method, of_method in behinds.items()}
