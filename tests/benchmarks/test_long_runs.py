"""Long runs at a constant rate: one short run, and the table of made-up ones."""

import jax
import numpy as np

from benchmarks.long_runs import LRS, PROBLEMS, runs_of, summary
from benchmarks.report.studies import long_runs
from tests.benchmarks.made_up import rows_of


def test_every_contender_runs_and_a_rate_that_diverges_has_no_last_loss():
    with jax.enable_x64(True):
        found = runs_of(PROBLEMS["noisy network"](), "SGD", steps=60)
    by_contender = {(run["contender"], run["lr"]): run for run in found}
    assert by_contender["mechanic", None]["last"] < 1
    assert by_contender["bare", 100.0]["last"] is None
    assert len(found) == 3 + len(LRS)


def test_a_rise_is_measured_from_the_minimum_on():
    assert summary(np.array([1.0, 0.5, 0.1, 0.3, 0.2])) == {"minimum": 0.1, "largest_after": 0.3, "last": 0.3}
    assert summary(np.array([1.0, 0.1, np.nan])) == {"minimum": 0.1, "largest_after": None, "last": None}


def test_the_table_counts_rises_and_takes_the_bare_base_at_its_best_rate():
    def case(contender, minimum, largest_after, last, base="SGD"):
        numbers = {"minimum": minimum, "largest_after": largest_after, "last": last}
        return {"contender": contender, "problem": "p", "base": base, **numbers}

    rows = rows_of(
        long_runs(
            [
                case("mechanic", 1e-9, 1e-2, 1e-5),
                case("mechanic", 1e-2, 2e-2, 1e-2, base="Lion"),
                case("bare", 1e-3, None, None),
                case("bare", 1e-4, 1e-4, 1e-4),
                case("bare", 0.0, 1e-17, 1e-20, base="Lion"),
            ]
        )
    )
    assert rows["Mechanic"] == ["2", "1", "1", "0", "5e-03"]
    assert rows["the base optimizer, tuned"] == ["2", "0", "0", "0", "5e-05"]
