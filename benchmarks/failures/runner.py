"""Runs cells in a process that may die or hang, and keeps the records."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import platform
import signal
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.failures import checkpoints, gradients, loops, parameters, ranks, schedules
from benchmarks.failures.contenders import CONTENDERS
from benchmarks.failures.verdicts import RAISES, SITUATIONS, Outcome, judge

THEMES = (gradients, parameters, schedules, loops, checkpoints, ranks)
ROWS = {  # importing a theme has entered its situations
    name: situation
    for module in THEMES
    for name, situation in SITUATIONS.items()
    if situation.run.__module__ == module.__name__
}
RECORDS = Path(__file__).parents[1] / "records" / "failures" / "failures.jsonl"

Cell = tuple[str, str]  # situation, contender
CellFunction = Callable[[str, str], Outcome]


def all_cells() -> list[Cell]:
    return [(row, contender) for row in ROWS for contender in CONTENDERS]


def run_cell(row: str, contender: str) -> Outcome:
    """Run a cell in this process, without its prints and warnings."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # An optimizer that fails may leave gradients disabled.
    with torch.enable_grad(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge(ROWS[row], CONTENDERS[contender])


def _work(function: CellFunction, connection: Connection) -> None:
    os.setsid()  # so that it can be ended together with what it has started
    with contextlib.suppress(EOFError):
        while True:
            row, contender = connection.recv()
            connection.send(function(row, contender))


class Worker:
    """A process that runs cells one after the other."""

    def __init__(self, function: CellFunction = run_cell) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(function, other))
        self.process.start()
        other.close()

    def run(self, row: str, contender: str, seconds: float) -> Outcome | None:
        """The outcome, or None where the process has died or not answered in time."""
        try:
            self.connection.send((row, contender))
            return self.connection.recv() if self.connection.poll(seconds) else None
        except (EOFError, BrokenPipeError):
            return None

    def end(self) -> None:
        """Let it finish, where it waits for another cell."""
        self.connection.close()
        self.process.join(10)
        if self.process.is_alive():
            self.kill()

    def kill(self) -> None:
        """End it together with all it has started. It has not been waited for, so the number is still its own."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def run(cells: Iterable[Cell], path: Path) -> None:
    """Run cells, and write each into the records as soon as it is known."""
    records = read(path)
    worker = Worker()
    try:
        for row, contender in cells:
            outcome = worker.run(row, contender, ROWS[row].seconds)
            if outcome is None:
                worker.kill()
                outcome = Outcome(RAISES, f"the process died, or gave no answer in {ROWS[row].seconds:.0f} s")
                worker = Worker()
            records[row, contender] = _record(row, contender, outcome)
            write(path, records)
            print(f"{row} / {contender}: {outcome.verdict}: {outcome.detail}", flush=True)
    finally:
        worker.end()


def _record(row: str, contender: str, outcome: Outcome) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    versions[CONTENDERS[contender].package] = CONTENDERS[contender].version
    return {
        "situation": row,
        "contender": contender,
        "verdict": outcome.verdict,
        "detail": outcome.detail,
        **({"tries": outcome.tries} if outcome.tries else {}),
        "versions": versions,
    }


def read(path: Path) -> dict[Cell, dict[str, Any]]:
    if not path.exists():
        return {}
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {(record["situation"], record["contender"]): record for record in found}


def write(path: Path, records: dict[Cell, dict[str, Any]]) -> None:
    """In the order of the matrix, without cells that it no longer has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(records[cell], ensure_ascii=False) for cell in all_cells() if cell in records]
    path.write_text("".join(f"{line}\n" for line in lines))
