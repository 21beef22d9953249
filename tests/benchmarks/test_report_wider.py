"""The tables of the wider suite, from made-up records that a hand can check."""

from benchmarks.report import tables, wider
from benchmarks.suite.tasks import HORIZONS
from tests.benchmarks.made_up import TASKS, falling, grid, record, results_of, rows_of


def with_measures(record, **measures):
    """The record with more measures, the same at every evaluation."""
    count = len(record["curve"]["step"])
    return {**record, "curve": record["curve"] | {key: [value] * count for key, value in measures.items()}}


def test_measures_are_of_the_base_tuned_on_test_loss_then_on_train_loss_then_of_ours():
    low, high = grid(TASKS[0], [0.2, 0.1])
    ours = record(TASKS[0], "mechanic adamw", 1.0, falling(0.15, 1))
    found = results_of(
        with_measures(low, test_loss=0.3, test_accuracy=0.9, test_ece=0.01),
        with_measures(high, test_loss=0.5, test_accuracy=0.8, test_ece=0.02),
        with_measures(ours, test_loss=0.4, test_accuracy=0.7, test_ece=0.03),
    )
    rows = rows_of(wider.on_test_data(found))
    assert rows == {TASKS[0]: ["0.3 → 0.5 → 0.4", "90.0% → 80.0% → 70.0%", "0.010 → 0.020 → 0.030"]}


def test_a_task_that_only_the_base_has_run_is_in_no_table():
    runs = [with_measures(each, test_loss=0.3) for each in grid(TASKS[0], [0.2, 0.1])]
    assert rows_of(wider.on_test_data(results_of(*runs))) == {}


def test_a_horizon_is_shown_once_ours_has_run_at_every_length():
    name, by_factor = next(iter(HORIZONS.items()))
    lengths = [task.name for task in by_factor.values()]
    bases = [with_measures(each, test_loss=0.3) for task in lengths for each in grid(task, [0.0, 0.5])]
    ours = [with_measures(record(task, "mechanic adamw", 1.0, falling(0.1, 1)), test_loss=0.2) for task in lengths]
    assert rows_of(wider.horizons(results_of(*bases))) == {}
    assert rows_of(wider.horizons(results_of(*bases, *ours[:-1]))) == {}
    assert rows_of(wider.horizons(results_of(*bases, *ours)))[name][:6] == ["10.0"] * 3 + ["0.3 → 0.2"] * 3


def test_one_seed_has_no_spread():
    ours = [record(TASKS[0], "mechanic adamw", 1.0, falling(loss, 1), seed) for seed, loss in enumerate((0.1, 0.2))]
    base = grid(TASKS[0], [0.0])
    assert rows_of(tables.per_task(results_of(*base, ours[0])))[TASKS[0]][1] == "10.0"
    assert rows_of(tables.per_task(results_of(*base, *ours)))[TASKS[0]][1] == "15.0 ± 5.0"


def test_other_methods_do_not_change_the_initial_loss():
    other = record(TASKS[0], "schedule-free adamw", 1.0, falling(0.5, 1))
    other["curve"]["train_loss"][0] = 2.0  # statistics of batch norms that were recomputed
    found = results_of(*grid(TASKS[0], [0.0]), other)
    assert found.initial(TASKS[0], "train_loss") == 1.0
