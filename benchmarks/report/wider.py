"""The tables of the wider suite: development and held-out tasks, longer runs, and what test data says."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.report import sceptic, studies, tables
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Results
from benchmarks.suite.record import final
from benchmarks.suite.split import DEVELOPMENT, HELD_OUT
from benchmarks.suite.tasks import HORIZONS

MEASURES = {"test_loss": "{:.3g}", "test_accuracy": "{:.1%}", "test_ece": "{:.3f}"}


def horizons(results: Results) -> str:
    """Rho with AdamW as runs grow longer; then test loss and accuracy of the base tuned on train loss, and of ours."""
    rows = []
    for name, by_factor in HORIZONS.items():
        if not all(results.rho(task.name, "mechanic adamw", "adamw") for task in by_factor.values()):
            continue
        cells = []
        for task in by_factor.values():
            lr, _ = results.tuned(task.name, "adamw", "train_loss")
            both = results.runs(task.name, "adamw")[lr], results.records_of(task.name, "mechanic adamw")
            rho = statistics.mean(results.rho(task.name, "mechanic adamw", "adamw"))
            cells.append([percent(rho), _arrows(both, "test_loss"), _arrows(both, "test_accuracy")])
        rows.append([name, *(cell for kind in zip(*cells, strict=True) for cell in kind)])
    factors = [f"{factor} ×" for factor in next(iter(HORIZONS.values()))]
    heads = [f"{kind}, {factor}" for kind in ("ρ %", "test loss", "accuracy") for factor in factors]
    return table(["", *heads], rows)


def on_test_data(results: Results) -> str:
    """With AdamW: tuned on the test loss, tuned on the train loss, and ours."""
    rows = []
    for task in results.tasks():
        ours = results.records_of(task, "mechanic adamw")
        tuned = [results.tuned(task, "adamw", key) for key in ("test_loss", "train_loss")]
        if ours and all(tuned):
            three = [*(results.runs(task, "adamw")[lr] for lr, _ in tuned), ours]
            rows.append([task, *(_arrows(three, key) for key in MEASURES)])
    return table(["", "test loss", "accuracy", "calibration error"], rows)


def _arrows(several: Iterable[list[dict[str, Any]]], key: str) -> str:
    """The means of a measure; nothing where the task does not have it."""
    by_run = list(several)
    if key not in by_run[0][0]["curve"]:
        return ""
    means = (statistics.mean(final(record, key) for record in records) for records in by_run)
    return " → ".join(MEASURES[key].format(mean) for mean in means)


def _of_suite(results: Results, make: Callable[[Results], str], tasks: Iterable[str]) -> str:
    return make(results.on(tasks))


_MAKERS: dict[str, Callable[[Results], str]] = {
    "headline": sceptic.headline,
    "summary": tables.summary,
    "bases": tables.bases,
    "tasks": tables.per_task,
    "peers": tables.peers,
    "losing": sceptic.losing,
    "on-test-data": on_test_data,
    "growing": studies.growing,
    "since-the-look": studies.since_the_look,
}
TABLES: dict[str, Callable[[Results], str]] = {"horizons": horizons} | {
    f"{suite}-{name}": functools.partial(_of_suite, make=make, tasks=tasks)
    for suite, tasks in {"development": DEVELOPMENT, "held-out": HELD_OUT}.items()
    for name, make in _MAKERS.items()
}
