"""The failure matrix: its records are whole, its page is made from them, and cells come out as recorded."""

import os
import time

import pytest
import torch

from benchmarks.failures import page, runner
from benchmarks.failures.verdicts import (
    NOT_APPLICABLE,
    RAISES,
    REFUSED,
    RIGHT,
    WARNED,
    WRONG,
    Outcome,
    outcome_of,
    worst,
)

# Where ours is wrong, as docs/failures.md says; a mend has to take its row out of here.
FAST_CELLS = [
    ("NaN gradient, once", "mechanic"),
    ("NaN gradient, once", "adamw"),
    ("NaN gradient of stride 0", "mechanic"),
    ("float16 loss scaled, never unscaled", "mechanic"),
    ("sparse gradient", "mechanic"),
    ("sparse gradient", "prodigy"),
    ("bfloat16 parameters, small steps", "mechanic"),
    ("bfloat16 parameters, small steps", "schedule-free"),
    ("plateau", "d-adaptation"),
    ("lr = 0", "mechanic"),
    ("lr = 0", "mechanic-pytorch"),
    ("negative lr", "mechanic"),
    ("maximize=True", "mechanic-pytorch"),
    ("maximize=True", "prodigy"),
    ("group added late", "prodigy-plus"),
    ("one gradient × 1e6", "mechanic"),
    ("update fails at its start", "mechanic"),
    ("state_dict round trip", "mechanic"),
    ("checkpoint with NaN", "mechanic"),
    ("checkpoint of another base", "mechanic"),
    ("checkpoint of another base", "adamw"),
]


@pytest.fixture(scope="module")
def records():
    return runner.read(runner.RECORDS)


def test_every_situation_is_recorded_for_every_contender(records):
    assert list(records) == runner.all_cells()
    assert len(runner.ROWS) >= 42
    for record in records.values():
        assert record["verdict"] in (RIGHT, REFUSED, WARNED, RAISES, WRONG, NOT_APPLICABLE)
        assert record["detail"]
        assert record["versions"]["torch"]


def test_the_page_is_made_from_the_records(records):
    assert page.PAGE.read_text() == page.render(records)


AS_TORCH_LOADS = {"checkpoint with NaN", "checkpoint with a wrong shape", "checkpoint with an entry missing"}
"""In the base's own state, which is loaded as torch loads it."""


def test_ours_never_raises_without_a_remedy_and_is_never_silently_wrong(records):
    ours = {row: record["verdict"] for (row, contender), record in records.items() if contender == "mechanic"}
    assert {row for row, verdict in ours.items() if verdict in (WRONG, RAISES)} == AS_TORCH_LOADS
    assert {row for row, verdict in ours.items() if verdict == WARNED} == {"one gradient × 1e6"}


@pytest.mark.parametrize(("row", "contender"), FAST_CELLS)
def test_a_cell_comes_out_as_recorded(records, row, contender):
    assert runner.run_cell(row, contender).verdict == records[row, contender]["verdict"]


def die(row, contender):
    os._exit(3)


def hang(row, contender):
    time.sleep(60)


def answer(row, contender):
    return Outcome(RIGHT, f"{row} / {contender}")


@pytest.mark.parametrize(("function", "seconds"), [(die, 60.0), (hang, 0.1)])
def test_a_cell_that_dies_or_hangs_gives_no_outcome(function, seconds):
    worker = runner.Worker(function)
    assert worker.run("row", "contender", seconds) is None
    worker.kill()
    assert worker.process.exitcode is not None


def test_a_worker_runs_cells_one_after_the_other():
    worker = runner.Worker(answer)
    assert [worker.run("row", name, 60.0).detail for name in ("a", "b")] == ["row / a", "row / b"]
    worker.end()
    assert worker.process.exitcode == 0


def raised_by(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_only_an_error_that_an_optimizer_raises_on_purpose_and_that_names_the_matter_is_a_refusal():
    p = torch.nn.Parameter(torch.ones(2))
    on_purpose = raised_by(lambda: torch.optim.SGD([p], lr=-1.0))
    assert outcome_of(on_purpose, "learning rate").verdict == REFUSED
    assert outcome_of(on_purpose, "gradient").verdict == RAISES
    of_an_operation = raised_by(lambda: torch.ones(2) + torch.ones(3))
    assert outcome_of(of_an_operation, "size").verdict == RAISES


def test_the_worst_of_several_outcomes_counts():
    outcomes = {"a": Outcome(RIGHT, "fine"), "b": Outcome(WRONG, "off"), "c": Outcome(REFUSED, "no")}
    assert worst(outcomes) == Outcome(WRONG, "off", tries="b")
