"""Runs a suite on Ray, from two cores to a cluster with GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import ray

from benchmarks.suite.driver import Outcome, Remaining, Work, drive, reason
from benchmarks.suite.measure import Settings, execute, is_infrastructure
from benchmarks.suite.plan import Pair, find
from benchmarks.suite.record import ROOT, Run, commit
from benchmarks.suite.recordbook import RecordBook
from benchmarks.suite.task import Task

WORKER_ENVIRONMENT = ("MECHANIC_DATA", "XDG_CACHE_HOME", "PYTHONPATH", "PYTHONWARNINGS")
RAY_ON_A_BUSY_MACHINE = {
    "RAY_worker_niceness": "0",  # 15 would leave the runs what all else on the machine spares
    "RAY_worker_register_timeout_seconds": "600",  # after 60 it ends workers that are slow to start
}
NOT_SENT = ["/.[a-z]*", "/benchmarks/records", "/build", "/dist", "/docs", "/examples", "/tests", "__pycache__"]


def run_suite(
    pairs: list[Pair],
    seeds: int,
    folder: Path,
    address: str | None,
    *,
    gpus_per_run: float = 0.0,
) -> Outcome:
    """Run what is not recorded of a suite."""
    book = RecordBook(folder)

    def work_without(missing: Collection[str]) -> Remaining:
        return Remaining([pair for pair in pairs if pair[0].name not in missing], book, seeds)

    return run_work(
        work_without,
        dict.fromkeys(task for task, _ in pairs),
        book,
        address,
        gpus_per_run=gpus_per_run,
    )


def run_work(
    work_without: Callable[[Collection[str]], Work],
    tasks: Iterable[Task],
    book: RecordBook,
    address: str | None,
    *,
    gpus_per_run: float = 0.0,
    find: Callable[[Run], Pair] = find,
) -> Outcome:
    """Run what is left. ``work_without`` plans it without some tasks, by name: those whose data or models are missing.

    ``find`` has to be a function of a module, for it is sent to other processes.
    """
    left = work_without(()).count()
    if not left:
        print("every run is recorded")
        return Outcome()
    missing = {task.name: why for task in tasks if task.name in left and (why := _prepare(task))}
    remaining = work_without(missing)
    for name, value in RAY_ON_A_BUSY_MACHINE.items():
        os.environ.setdefault(name, value)
    ray.init(
        address=address,
        runtime_env=runtime_environment(sends_code=address is not None),
        include_dashboard=None if address else False,
        log_to_driver=False,
    )
    try:
        settings = Settings(commit(), gpus_per_run > 0, find)
        outcome = drive(remaining, book, RayPool(settings, gpus_per_run))
    finally:
        ray.shutdown()
    outcome.not_run |= {f"all of {task}": why for task, why in missing.items()}
    return outcome


def _prepare(task: Task) -> str | None:
    """Weights to fine-tune and tokenizers are made once, not by every worker; what could not be made, and why."""
    try:
        task.model(), task.data()
    except Exception as error:
        if is_infrastructure(error):
            return reason(error)
        raise
    return None


def runtime_environment(sends_code: bool) -> dict[str, Any]:
    """What Ray gives to every worker; the nodes of a cluster get the code, too, where it is not installed."""
    variables = {name: os.environ[name] for name in WORKER_ENVIRONMENT if name in os.environ}
    found: dict[str, Any] = {"env_vars": {**variables, "OMP_NUM_THREADS": "1"}}
    if sends_code:
        found |= {"working_dir": str(ROOT), "excludes": NOT_SENT, "py_modules": [str(ROOT / "src" / "mechanic")]}
    return found


class RayPool:
    """Runs as tasks of Ray. It starts none again by itself: the driver does, and counts."""

    def __init__(self, settings: Settings, gpus_per_run: float) -> None:
        self._settings = settings
        self._execute = ray.remote(num_cpus=1, num_gpus=gpus_per_run, max_retries=0)(execute)
        self._in_flight: dict[Any, Run] = {}
        resources = ray.cluster_resources()
        self.slots = max(1, int(resources["CPU"]))
        if gpus_per_run:
            if not resources.get("GPU"):
                raise SystemExit("--gpus-per-run: no node has a GPU")  # Ray would wait for one for ever
            self.slots = max(1, min(self.slots, int(resources["GPU"] / gpus_per_run)))

    def start(self, run: Run) -> None:
        self._in_flight[self._execute.remote(run, self._settings)] = run

    def finished(self) -> list[tuple[Run, dict[str, Any] | Exception]]:
        done, others = ray.wait(list(self._in_flight), num_returns=1)
        if others:  # to look at all of them takes long, so all that are done are taken at once
            done += ray.wait(others, num_returns=len(others), timeout=0)[0]
        return [(self._in_flight.pop(reference), self._get(reference)) for reference in done]

    def _get(self, reference: Any) -> dict[str, Any] | Exception:
        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:  # what the worker raised, or that it died
            return error
