"""Starts what a suite still needs, writes down what comes back, and starts again what a machine lost."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from tqdm import tqdm

from benchmarks.suite.plan import Pair, expected_runs, needed
from benchmarks.suite.record import Run, raised, run_of
from benchmarks.suite.recordbook import RecordBook
from benchmarks.suite.tasks import TASKS

ATTEMPTS = 4  # at a run that machines fail, the first one included


class Remaining:
    """How much of a suite is left. A record changes the plan of its own pair only, so only that is made anew."""

    def __init__(self, pairs: list[Pair], book: RecordBook, seeds: int) -> None:
        self.book, self.seeds = book, seeds
        self._pairs = {(task.name, contender.name): (task, contender) for task, contender in pairs}
        self._plane_of = {line: contender.name for _, contender in pairs for line in contender.lines}
        self._done: Counter[tuple[str, str]] = Counter()
        self._timed: Counter[str] = Counter()  # runs, by task
        self._spent: Counter[str] = Counter()  # seconds, by task
        self._needed: dict[tuple[str, str], list[Run]] = {}
        self._guessed: Counter[tuple[str, str]] = Counter()  # runs that are left, by pair
        self._left: Counter[str] = Counter()  # and by task
        for run, record in book.records.items():
            self._note(run, record)
        for task, contender in self._pairs:
            self._plan(task, contender)

    def ready(self) -> list[Run]:
        """What can be started now, and what has been started."""
        return [run for runs in self._needed.values() for run in runs]

    def recorded(self, record: dict[str, Any]) -> list[Run]:
        """What its pair needs after a new record."""
        run = run_of(record)
        self._note(run, record)
        pair = self._pair_of(run)
        return self._plan(*pair) if pair in self._pairs else []

    def count(self) -> dict[str, int]:
        """By task; what a grid still needs is a guess."""
        return {task: count for task, count in self._left.items() if count}

    def seconds_per_run(self, task: str) -> float:
        """As recorded; before that, as the task guesses."""
        return self._spent[task] / self._timed[task] if self._timed[task] else TASKS[task].seconds

    def seconds(self) -> float:
        """On one core."""
        return sum(count * self.seconds_per_run(task) for task, count in self._left.items())

    def _pair_of(self, run: Run) -> tuple[str, str]:
        return run.task, self._plane_of.get(run.contender, run.contender)

    def _note(self, run: Run, record: dict[str, Any]) -> None:
        self._done[self._pair_of(run)] += 1
        if not raised(record):
            self._timed[run.task] += 1
            self._spent[run.task] += record["seconds"]

    def _plan(self, task: str, contender: str) -> list[Run]:
        pair = task, contender
        runs = self._needed[pair] = needed(*self._pairs[pair], self.book.records, self.seeds)
        guess = expected_runs(self._pairs[pair][1], self.seeds) - self._done[pair]
        guess = max(len(runs), guess) if runs else 0
        self._left[task] += guess - self._guessed[pair]
        self._guessed[pair] = guess
        return runs


class Work(Protocol):
    """What is left to run, kept up to date by every new record; see :class:`Remaining`."""

    def ready(self) -> list[Run]: ...

    def recorded(self, record: dict[str, Any]) -> list[Run]: ...

    def count(self) -> dict[str, int]: ...

    def seconds_per_run(self, task: str) -> float: ...

    def seconds(self) -> float: ...


def list_runs(remaining: Work, cores: int) -> None:
    """Print what would run and how long."""
    left = remaining.count()
    print(f"{'task':32} {'runs':>6} {'s/run':>6} {'core min':>9}")
    for task, count in left.items():
        each = remaining.seconds_per_run(task)
        print(f"{task:32} {count:6} {each:6.1f} {count * each / 60:9.1f}")
    print(f"{sum(left.values())} runs, {remaining.seconds() / cores / 3600:.1f} h on {cores} cores")


class Pool(Protocol):
    """Where runs are run."""

    slots: int  # how many at the same time

    def start(self, run: Run) -> None: ...

    def finished(self) -> list[tuple[Run, dict[str, Any] | Exception]]:
        """Wait for one at least: its record, or why there is none."""
        ...


@dataclass
class Outcome:
    """What became of a suite."""

    made: int = 0
    not_run: dict[str, str] = field(default_factory=dict)  # what, and why; nothing of these is recorded


def drive(remaining: Work, book: RecordBook, pool: Pool) -> Outcome:
    """Until nothing is left. What a machine fails is tried again, behind all others, and never recorded."""
    outcome = Outcome()
    waiting = deque(remaining.ready())
    known = set(waiting)  # whatever was started, or waits to be
    failed: Counter[Run] = Counter()
    in_flight = 0
    with tqdm(total=sum(remaining.count().values()), unit="run", smoothing=0) as bar:
        while waiting or in_flight:
            while waiting and in_flight < 2 * pool.slots:
                pool.start(waiting.popleft())
                in_flight += 1
            finished = pool.finished()
            book.add(*(found for _, found in finished if not isinstance(found, Exception)))
            for run, found in finished:
                in_flight -= 1
                if isinstance(found, Exception):
                    failed[run] += 1
                    if failed[run] < ATTEMPTS:
                        waiting.append(run)
                    else:
                        outcome.not_run[str(run)] = reason(found)
                    continue
                outcome.made += 1
                fresh = [run for run in remaining.recorded(found) if run not in known]
                known.update(fresh)
                waiting.extendleft(reversed(fresh))  # others wait for these
                bar.update()
            bar.total = bar.n + sum(remaining.count().values())
            time_left = time.strftime("%H:%M:%S", time.gmtime(remaining.seconds() / pool.slots))
            bar.set_postfix_str(f"{time_left} of work left", refresh=False)
    return outcome


def reason(error: BaseException) -> str:
    """In one line; of what happened on a worker, without Ray's wrapping."""
    cause = getattr(error, "cause", None) or error
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
