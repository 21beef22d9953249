"""What raises is no score: a contender's exception is counted apart, and a machine's is never recorded."""

from dataclasses import replace

import pytest
import torch

from benchmarks.report import tables
from benchmarks.report.results import Results
from benchmarks.suite import plan
from benchmarks.suite.contenders import CONTENDERS
from benchmarks.suite.measure import Settings, execute
from benchmarks.suite.record import Run, final, raised, run_of
from benchmarks.suite.recordbook import RECORDS, RecordBook
from benchmarks.suite.tasks import TASKS
from tests.benchmarks.runs import needs_data, raising, record_of


@needs_data
def test_what_a_contender_raises_is_recorded_with_its_step_and_is_no_score(monkeypatch):
    monkeypatch.setitem(CONTENDERS, "sgd", raising(ZeroDivisionError))
    monkeypatch.setitem(TASKS, "convex-iris", replace(TASKS["convex-iris"], steps=50))
    record = execute(Run("convex-iris", "sgd", 0.1, 0), Settings())
    assert record["error"] == "ZeroDivisionError: in the third step"
    assert record["error_step"] == 2
    assert record["curve"]["step"] == [0, 1, 2]
    assert raised(record)
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        final(record)


@needs_data
@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, FileNotFoundError, ImportError, OSError])
def test_what_the_machine_raises_is_never_a_record(monkeypatch, error):
    monkeypatch.setitem(CONTENDERS, "sgd", raising(error))
    with pytest.raises(error):
        execute(Run("convex-iris", "sgd", 0.1, 0), Settings())


def test_the_plan_goes_on_where_some_learning_rates_raise_and_ends_where_all_do():
    task, contender = TASKS["convex-iris"], CONTENDERS["sgd"]
    broken = {"error": "ValueError: too large"}
    for raises_from in (1.0, 0.0):
        records = {}
        while runs := plan.needed(task, contender, records, seeds=2):
            for run in runs:
                records[run] = record_of(run, run.lr) | (broken if run.lr >= raises_from else {})
        whole = [record for record in records.values() if not raised(record)]
        assert bool(whole) == (raises_from > 0)


def test_the_report_counts_errors_and_leaves_them_out_of_the_means():
    records = [record_of(Run("convex-iris", "sgd", 0.1, seed), 0.0) for seed in range(3)]
    records += [record_of(Run("convex-iris", "mechanic sgd", 1.0, seed), 0.1) for seed in range(3)]
    records += [record_of(Run("convex-iris", "d-adaptation sgd", 1.0, seed), 0.1) for seed in range(2)]
    broken = {**vars(Run("convex-iris", "d-adaptation sgd", 1.0, 2)), "error": "ValueError: no", "curve": {}}
    results = Results({run_of(record): record for record in [*records, broken]})
    assert results.rho("convex-iris", "d-adaptation sgd", "sgd") == pytest.approx([0.1, 0.1])
    assert results.raised("d-adaptation") == {"d-adaptation sgd": 1}
    rows = {line.split(" | ")[0]: line for line in tables.summary(results).splitlines()}
    assert rows["| D-Adaptation"].endswith("| 1 (d-adaptation sgd) |")
    assert rows["| Mechanic"].endswith("| 0 |")

    alone = Results({run_of(record): record for record in [*records[:6], broken]})
    assert "| D-Adaptation | 0 |" in tables.summary(alone)


def test_no_committed_record_is_an_error():
    book = RecordBook(RECORDS)
    assert book.records
    assert [run for run, record in book.records.items() if raised(record)] == []
