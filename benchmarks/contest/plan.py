"""Which runs the contest still needs: first the search, and when all of that is recorded, the judgement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from benchmarks.contest.choice import chosen
from benchmarks.contest.methods import DEFAULTS, METHODS, contender_name, contenders
from benchmarks.contest.tasks import HORIZONS, JUDGED, SEARCHED, TASKS, judged_name, search_name
from benchmarks.suite.plan import Pair
from benchmarks.suite.record import Run, raised, run_of
from benchmarks.suite.recordbook import RecordBook

FOLDER = "contest"  # of the records'
SEEDS = 3


def find(run: Run) -> Pair:
    """What a run is of."""
    return TASKS[run.task], contenders()[run.contender]


def run_with(task: str, method: str, number: int, seed: int) -> Run:
    contender = contenders()[contender_name(method, number)]
    return Run(task, contender.name, contender.lr or 1.0, seed)


def search_runs() -> list[Run]:
    """Every point on every development task, on one seed."""
    numbers = {name: range(len(method.points())) for name, method in METHODS.items()}
    return [
        run_with(search_name(task), method, number, seed=0)
        for task in SEARCHED
        for method in METHODS
        for number in numbers[method]
    ]


def judged_runs(points: dict[str, int], seeds: int = SEEDS) -> list[Run]:
    """The points that were found, and the authors', on every held-out task and horizon."""
    wanted = [(method, number) for method in METHODS for number in dict.fromkeys([points[method], DEFAULTS])]
    return [
        run_with(judged_name(task, horizon), method, number, seed)
        for task in JUDGED
        for horizon in HORIZONS
        for method, number in wanted
        for seed in range(seeds)
    ]


class Contest:
    """What is left of the contest. The judgement's runs are known only when the search is complete."""

    def __init__(self, book: RecordBook, seeds: int = SEEDS, without: Collection[str] = ()) -> None:
        """``without`` some tasks, by name: while one of the search's is missing, nothing is judged."""
        self.book, self.seeds, self.without = book, seeds, without
        self._search = set(search_runs())
        self._timed: Counter[str] = Counter()  # runs, by task
        self._spent: Counter[str] = Counter()  # seconds, by task
        self._missing: dict[Run, None] = {}
        for record in book.records.values():
            self._note(record)
        self._searching = bool(self._search - book.records.keys())
        self._add(search_runs() if self._searching else self._judgement())

    def ready(self) -> list[Run]:
        return list(self._missing)

    def recorded(self, record: dict[str, Any]) -> list[Run]:
        """What can be started after a new record: nothing, or the whole judgement."""
        self._note(record)
        self._missing.pop(run_of(record), None)
        if self._searching and not self._missing and not self._search - self.book.records.keys():
            self._searching = False
            self._add(self._judgement())
            return self.ready()
        return []

    def count(self) -> dict[str, int]:
        """By task; of the judgement a guess, while nobody knows its points."""
        left = Counter(run.task for run in self._missing)
        if self._searching:
            each = 2 * len(METHODS) * self.seeds
            left.update({judged_name(task, horizon): each for task in JUDGED for horizon in HORIZONS})
        return {task: count for task, count in left.items() if task not in self.without}

    def seconds_per_run(self, task: str) -> float:
        """As recorded; before that, as the task guesses."""
        return self._spent[task] / self._timed[task] if self._timed[task] else TASKS[task].seconds

    def seconds(self) -> float:
        return sum(count * self.seconds_per_run(task) for task, count in self.count().items())

    def _judgement(self) -> list[Run]:
        return judged_runs(chosen(self.book.records), self.seeds)

    def _add(self, runs: Iterable[Run]) -> None:
        known = self.book.records
        self._missing |= {run: None for run in runs if run not in known and run.task not in self.without}

    def _note(self, record: dict[str, Any]) -> None:
        if not raised(record):
            self._timed[record["task"]] += 1
            self._spent[record["task"]] += record["seconds"]
