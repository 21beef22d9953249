"""Runs a suite on Ray, from two cores to a cluster, and appends a record for every run."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import ray
from tqdm import tqdm

from benchmarks.suite.measure import execute
from benchmarks.suite.plan import Pair, expected_runs, needed
from benchmarks.suite.record import Run
from benchmarks.suite.recordbook import RecordBook
from benchmarks.suite.tasks import TASKS

WORKER_ENVIRONMENT = ("MECHANIC_DATA", "XDG_CACHE_HOME", "PYTHONPATH", "PYTHONWARNINGS")


class Remaining:
    """How much of a suite is left."""

    def __init__(self, pairs: list[Pair], book: RecordBook, seeds: int) -> None:
        self.pairs, self.book, self.seeds = pairs, book, seeds

    def ready(self) -> list[Run]:
        """What can be started now."""
        runs = (needed(task, contender, self.book.records, self.seeds) for task, contender in self.pairs)
        return list(dict.fromkeys(run for pair in runs for run in pair))

    def count(self) -> dict[str, int]:
        """By task; what a grid still needs is a guess."""
        done: dict[tuple[str, str], int] = defaultdict(int)
        for run in self.book.records:
            done[run.task, run.contender] += 1
        left: dict[str, int] = defaultdict(int)
        for task, contender in self.pairs:
            if start := len(needed(task, contender, self.book.records, self.seeds)):
                guess = expected_runs(contender, self.seeds) - done[task.name, contender.name]
                left[task.name] += max(start, guess)
        return left

    def seconds_per_run(self) -> dict[str, float]:
        """By task, as recorded; before that, as the task guesses."""
        spent: dict[str, list[float]] = defaultdict(list)
        for run, record in self.book.records.items():
            spent[run.task].append(record["seconds"])
        return {name: sum(spent[name]) / len(spent[name]) if name in spent else TASKS[name].seconds for name in TASKS}

    def seconds(self, left: dict[str, int]) -> float:
        """Of so many runs, on one core."""
        each = self.seconds_per_run()
        return sum(count * each[task] for task, count in left.items())


def list_runs(pairs: list[Pair], seeds: int, folder: Path, cores: int) -> None:
    """Print what would run and how long."""
    remaining = Remaining(pairs, RecordBook(folder), seeds)
    each = remaining.seconds_per_run()
    left = remaining.count()
    print(f"{'task':32} {'runs':>6} {'s/run':>6} {'core min':>9}")
    for task, count in left.items():
        print(f"{task:32} {count:6} {each[task]:6.1f} {count * each[task] / 60:9.1f}")
    print(f"{sum(left.values())} runs, {remaining.seconds(left) / cores / 3600:.1f} h on {cores} cores")


def run_suite(pairs: list[Pair], seeds: int, folder: Path, address: str | None) -> int:
    """Run what is not recorded; the number of runs made."""
    book = RecordBook(folder)
    remaining = Remaining(pairs, book, seeds)
    if not remaining.ready():
        print("every run is recorded")
        return 0
    # Weights to fine-tune and tokenizers are made once, not by every worker at the same time.
    left = remaining.count()
    for task in dict.fromkeys(task for task, _ in pairs if left.get(task.name)):
        task.model(), task.data()

    environment = {name: os.environ[name] for name in WORKER_ENVIRONMENT if name in os.environ}
    ray.init(
        address=address,
        runtime_env={"env_vars": {**environment, "OMP_NUM_THREADS": "1"}},
        include_dashboard=None if address else False,
        log_to_driver=False,
    )
    try:
        return _drive(remaining, book)
    finally:
        ray.shutdown()


def _drive(remaining: Remaining, book: RecordBook) -> int:
    # A worker that dies takes its run with it: Ray starts that again.
    start = ray.remote(num_cpus=1, max_retries=10)(execute)
    cores = max(1, int(ray.cluster_resources()["CPU"]))
    in_flight: dict[Any, Run] = {}
    made = 0
    with tqdm(total=sum(remaining.count().values()), unit="run", smoothing=0) as bar:
        while True:
            waiting = [run for run in remaining.ready() if run not in set(in_flight.values())]
            for run in waiting[: 2 * cores - len(in_flight)]:
                in_flight[start.remote(run)] = run
            if not in_flight:
                return made
            finished, _ = ray.wait(list(in_flight), num_returns=1)
            for reference in finished:
                book.add(ray.get(reference))
                del in_flight[reference]
                made += 1
                bar.update()
            left = remaining.count()
            bar.total = bar.n + sum(left.values())
            time_left = time.strftime("%H:%M:%S", time.gmtime(remaining.seconds(left) / cores))
            bar.set_postfix_str(f"{time_left} of work left")
