"""The driver of a suite: fast, and honest about machines that fail. A made-up pool stands in for Ray."""

import time

import pytest

from benchmarks.suite import driver, plan
from benchmarks.suite.record import ROOT, Run
from benchmarks.suite.recordbook import RecordBook
from tests.benchmarks.runs import FakePool, record_of

SEEDS = 3


def drive(folder, pairs, pool):
    book = RecordBook(folder)
    outcome = driver.drive(driver.Remaining(pairs, book, SEEDS), book, pool)
    assert RecordBook(folder).records == book.records
    assert len(book.records) == outcome.made
    return outcome, book


@pytest.mark.long
def test_a_hundred_runs_a_second_with_two_thousand_in_flight(tmp_path):
    pairs = [pair for pairs in plan.SUITES.values() for pair in pairs]
    pool = FakePool(made=lambda run: record_of(run, abs(run.lr - 0.01)))
    start = time.perf_counter()
    outcome, book = drive(tmp_path, pairs, pool)
    rate = outcome.made / (time.perf_counter() - start)
    assert outcome.made > 4500
    assert pool.most == 2000
    assert set(pool.started.values()) == {1}
    assert not any(plan.needed(*pair, book.records, SEEDS) for pair in pairs)
    assert rate >= 100


def test_counts_that_are_kept_are_those_that_are_made_anew(tmp_path):
    book = RecordBook(tmp_path)
    pairs = plan.SUITES["smoke"]
    kept = driver.Remaining(pairs, book, SEEDS)
    while runs := kept.ready():
        book.add(record_of(runs[0], 0.5) | {"seconds": runs[0].lr})
        kept.recorded(book.records[runs[0]])
        anew = driver.Remaining(pairs, book, SEEDS)
        assert kept.ready() == anew.ready()
        assert kept.count() == anew.count()
        assert kept.seconds() == pytest.approx(anew.seconds())
    assert kept.count() == {}


def test_what_a_machine_fails_is_run_again_and_is_no_record_until_it_has_run(tmp_path):
    runs = [Run("convex-iris", "mechanic adamw", 1.0, seed) for seed in range(SEEDS)]
    failures = {runs[0]: driver.ATTEMPTS - 1, runs[1]: driver.ATTEMPTS}
    pool = FakePool(2, failures=failures)
    smoke = plan.SUITES["smoke"]
    outcome, book = drive(tmp_path, smoke, pool)
    assert pool.started[runs[0]] == pool.started[runs[1]] == driver.ATTEMPTS
    assert outcome.not_run == {str(runs[1]): "OSError: a disk is full"}
    missing = [run for pair in smoke for run in plan.needed(*pair, book.records, SEEDS)]
    assert missing == [runs[1]]
    again = driver.drive(driver.Remaining(smoke, book, SEEDS), book, FakePool(2))
    assert (again.made, again.not_run) == (1, {})


def test_a_cluster_is_sent_the_code_and_not_what_is_large_or_private():
    pytest.importorskip("ray")
    from ray._private.runtime_env import packaging

    from benchmarks.suite import runner

    assert set(runner.runtime_environment(sends_code=False)) == {"env_vars"}
    sent = runner.runtime_environment(sends_code=True)
    assert sent["py_modules"] == [str(ROOT / "src" / "mechanic")]
    is_left = packaging._get_excludes(ROOT, sent["excludes"])
    assert not any(is_left(ROOT / name) for name in (".", "benchmarks/suite/loop.py", "src/mechanic/tuner.py"))
    assert all(is_left(ROOT / name) for name in (".git", ".venv", ".venv-floor-jax", "docs", "benchmarks/records"))
