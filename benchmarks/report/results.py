"""Answers from the records: the tuned learning rates, and how far from them each contender ends."""

from __future__ import annotations

import functools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from benchmarks.suite.record import Run, final, raised
from benchmarks.suite.tasks import CPU

BASES = {"sgd": "SGD with momentum", "adamw": "AdamW", "nadamw": "NAdamW", "lion": "Lion"}
FAMILIES = {  # by the first word of a contender's name
    "mechanic": "Mechanic",
    "mechanic-paper": "Mechanic, paper preset",
    "mechanic-pytorch": "mechanic-pytorch",
    "d-adaptation": "D-Adaptation",
    "prodigy": "Prodigy",
    "dog": "DoG, averaged",
    "schedule-free": "Schedule-Free, default lr",
    "prodigy-plus-schedule-free": "Prodigy + Schedule-Free",
    "schedule-free-plus": "ScheduleFree+, own code",
}
ALONE = {  # measured against one base
    "prodigy": "adamw",
    "dog": "sgd",
    "prodigy-plus-schedule-free": "adamw",
    "schedule-free-plus": "adamw",
}
SEEDS = 3  # of every task and contender of the suite; a study may have some of more


class Results:
    """Questions to the records of the first seeds."""

    def __init__(
        self, records: dict[Run, dict[str, Any]], of: Iterable[str] = tuple(task.name for task in CPU)
    ) -> None:
        self.records, self._of = records, tuple(of)
        self._runs: dict[tuple[str, str], dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        self._raised: Counter[tuple[str, str]] = Counter()
        for run in sorted(records):
            if run.seed >= SEEDS:
                continue
            if raised(records[run]):
                self._raised[run.task, run.contender] += 1  # counted, and in no mean
            else:
                self._runs[run.task, run.contender][run.lr].append(records[run])

    def tasks(self) -> list[str]:
        """Those of the suite that have records; others are studies of their own."""
        found = {task for task, _ in (*self._runs, *self._raised)}
        return [task for task in self._of if task in found]

    def on(self, tasks: Iterable[str]) -> Results:
        """The same questions about other tasks."""
        return Results(self.records, tasks)

    def pairs(self) -> list[tuple[str, str]]:
        """Task and contender, wherever a run did not raise."""
        return list(self._runs)

    def records_of(self, task: str, contender: str) -> list[dict[str, Any]]:
        return [record for records in self.runs(task, contender).values() for record in records]

    def runs(self, task: str, contender: str) -> dict[float, list[dict[str, Any]]]:
        """By learning rate, one record per seed."""
        return self._runs.get((task, contender), {})

    def raised(self, family: str) -> dict[str, int]:
        """How many runs of the suite's tasks raised, by contender of a family."""
        counts = {name: sum(self._raised[task, name] for task in self.tasks()) for name in members(family).values()}
        return {name: count for name, count in counts.items() if count}

    @functools.cache  # noqa: B019 - lives as long as the report
    def tuned(self, task: str, base: str, key: str) -> tuple[float, list[float]] | None:
        """The best learning rate of those run on the most seeds, and its final losses by seed."""
        runs = self.runs(task, base)
        most = max(map(len, runs.values()), default=0)
        by_lr = {lr: [final(each, key) for each in records] for lr, records in runs.items() if len(records) == most}
        return min(by_lr.items(), key=lambda item: statistics.mean(item[1])) if by_lr else None

    def rho(self, task: str, contender: str, base: str, key: str = "train_loss") -> list[float]:
        """By seed: 0 is the tuned base, 1 has learned nothing or diverged; what raised is left out."""
        return self._rho(self.records_of(task, contender), task, base, key)

    def rho_of_every_seed(self, task: str, contender: str, base: str, key: str = "train_loss") -> dict[int, float]:
        """By seed, those included that other contenders do not have."""
        found = {
            run.seed: record
            for run, record in self.records.items()
            if (run.task, run.contender) == (task, contender) and not raised(record)
        }
        return dict(zip(found, self._rho(found.values(), task, base, key), strict=False))  # if not tuned, there is none

    def _rho(self, records: Iterable[dict[str, Any]], task: str, base: str, key: str) -> list[float]:
        best = self.tuned(task, base, key)
        if best is None:
            return []
        tuned, start = statistics.mean(best[1]), self.initial(task, key)
        return [min(1.0, (final(record, key) - tuned) / (start - tuned)) for record in records]

    @functools.cache  # noqa: B019
    def initial(self, task: str, key: str) -> float:
        """In the mean of the seeds, however many runs each has.

        Of the bare base optimizers, where there are any: methods that average recompute the statistics of batch norms.
        """
        found = [run for run, record in self.records.items() if run.task == task and record["curve"].get(key)]
        bare = [run for run in found if run.contender in BASES]
        by_seed: dict[int, list[float]] = defaultdict(list)
        for run in bare or found:
            if run.seed < SEEDS:
                by_seed[run.seed].append(self.records[run]["curve"][key][0])
        return statistics.mean(map(statistics.mean, by_seed.values()))

    def family(self, name: str, key: str = "train_loss") -> dict[tuple[str, str], float]:
        """Mean rho of a family's contenders, by task and base."""
        found = {}
        for base, contender in members(name).items():
            for task in self.tasks():
                if values := self.rho(task, contender, base, key):
                    found[task, base] = statistics.mean(values)
        return found


def members(family: str) -> dict[str, str]:
    """Its contenders, by the base they are measured against."""
    if family in ALONE:
        return {ALONE[family]: family}
    # D-Adaptation's Lion is an experiment, as its authors say, and diverges nearly everywhere here.
    return {base: f"{family} {base}" for base in BASES if (family, base) != ("d-adaptation", "lion")}
