"""The tables of the report, from made-up records that a hand can check; and the committed ones, from the records."""

import pytest

from benchmarks.report import pages, sceptic, tables, wider
from benchmarks.report.results import Results
from benchmarks.suite.record import Run, raised, run_of
from benchmarks.suite.recordbook import RECORDS, RecordBook
from tests.benchmarks.runs import DOCS, TASKS, falling, grid, record, record_of, results_of, rows_of


@pytest.mark.long
def test_every_committed_page_is_what_the_records_make():
    made = pages.tables_of(RECORDS)
    for page in pages.PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        assert pages.fill(text, made) == text, page


def test_no_committed_record_is_an_error():
    book = RecordBook(RECORDS)
    assert book.records
    assert [run for run, record in book.records.items() if raised(record)] == []


def ours(losses, tasks=TASKS, contender="mechanic adamw"):
    """A run of one contender on every task, at its final loss nearly from the start."""
    return [record(task, contender, 1.0, falling(loss, 1)) for task, loss in zip(tasks, losses, strict=True)]


def grids(losses):
    return [each for task in TASKS for each in grid(task, losses)]


def test_the_fixed_rate_of_a_task_is_chosen_on_all_others_and_was_run_everywhere():
    # The third task likes another rate than the first two, which decide for it, and it takes part in theirs.
    several = ([0.0, 0.2, 0.6], [0.0, 0.1, 0.6], [0.5, 0.35, 0.0])
    records = [each for task, losses in zip(TASKS, several, strict=True) for each in grid(task, losses)]
    # Without the first: 1 has 0 + .5, 2 has .1 + .35, 3 has .6 + 0. Without the second: .5, .55, .6.
    found = sceptic.fixed_rate(results_of(*records), "adamw")
    assert found == pytest.approx({TASKS[0]: 0.2, TASKS[1]: 0.0, TASKS[2]: 0.5})
    found = sceptic.fixed_rate(results_of(*grid(TASKS[0], [0.5, 0.4, 0.0]), *grid(TASKS[1], [0.2, 0.0])), "adamw")
    assert found == pytest.approx({TASKS[0]: 0.4, TASKS[1]: 0.0})
    assert sceptic.fixed_rate(results_of(*grid(TASKS[0], [0.5, 0.0])), "adamw") == {}


def test_the_greedy_rate_is_the_best_at_half_time():
    found = sceptic.greedy(results_of(*grid(TASKS[0], [0.3, 0.0], halves=[0.4, 0.9])), "adamw")
    assert found == pytest.approx({TASKS[0]: 0.3})


def test_gains_count_as_0_in_the_headline_and_intervals_are_over_tasks():
    rows = rows_of(sceptic.headline(results_of(*grids([0.2, 0.5]), *ours([0.0, 0.2, 0.6]))))
    assert rows["Mechanic"][1] == rows["Mechanic"][-1]
    # 0 where it gained .25; with three tasks, all of a resample may be the best or the worst.
    assert rows["Mechanic"][:2] == ["", "16.7 [0.0, 50.0]"]
    assert rows["one learning rate, the best on all other tasks"][1] == "0.0 [0.0, 0.0]"
    assert sceptic.headline(results_of()).count("\n") == 1


def test_the_start_is_compared_with_the_tuned_rates_at_the_same_step():
    records = [record(task, "adamw", 1.0, falling(0.0, 2)) for task in TASKS]  # from 5 % of the steps on
    losses = zip(TASKS, (0.1, 0.5, 2.0), (1, 3, 2), strict=True)
    records += [record(task, "mechanic adamw", 1.0, falling(loss, at)) for task, loss, at in losses]
    cells = rows_of(sceptic.early(results_of(*records)))["Mechanic"]
    assert [cell.split()[0] for cell in cells[:3]] == ["0.0", "70.0", "53.3"]  # .1, 1 and 1; then .1, .5 and 1
    assert cells[3:] == ["", "", ""]


def test_what_is_far_behind_is_listed_and_rivals_are_compared_on_the_same_tasks():
    records = [*grids([0.0, 0.5]), *ours([0.04, 0.1, 0.2])]
    assert list(rows_of(sceptic.losing(results_of(*records))).items()) == [
        ("convex-glass, AdamW", ["20.0", "1000", "1.00", "0.00", "0.200"]),
        ("convex-wine, AdamW", ["10.0", "1000", "1.00", "0.00", "0.100"]),
    ]
    theirs = ours([0.24, 0.3], TASKS[:2], "prodigy")
    rows = rows_of(sceptic.paired(results_of(*records, *theirs)))
    assert rows == {"Prodigy": ["20.0 [20.0, 20.0]", "2", "0", "2"]}


def test_times_to_the_tuned_loss_are_in_units_of_the_tuned_bases():
    records = [record(task, "adamw", 1.0, falling(0.0, 5)) for task in TASKS]
    # Tuned gets there with evaluation 5, at step 300; ours at 200, at 300, and never.
    for task, at in zip(TASKS, (4, 5, None), strict=True):
        records.append(record(task, "mechanic adamw", 1.0, falling(0.01, at) if at else falling(0.03, 1)))
    rows = rows_of(sceptic.time_to_target(results_of(*records)))
    # The tuned base has ratios 1.5, 1, 1; areas (4 - 1.5) / 3, 1, 1.
    assert rows["AdamW, tuned"][:2] == ["3 of 3", "1.00"]
    assert rows["AdamW, tuned"][2].startswith("0.94 ")
    assert rows["Mechanic"][:2] == ["2 of 3", f"{(200 / 300 + 1) / 2:.2f}"]
    assert rows["Mechanic"][2].startswith("0.67 ")
    assert rows["Mechanic"][3] == "3 of 3"  # the wider target is above .03
    assert sceptic.time_to_target(results_of()).count("\n") == 1


def with_measures(of, **measures):
    """The record with more measures, the same at every evaluation."""
    return {**of, "curve": of["curve"] | {key: [value] * 4 for key, value in measures.items()}}


def test_measures_are_of_the_base_tuned_on_test_loss_then_on_train_loss_then_of_ours():
    low, high = grid(TASKS[0], [0.2, 0.1])
    low = with_measures(low, test_loss=0.3, test_accuracy=0.9, test_ece=0.01)
    high = with_measures(high, test_loss=0.5, test_accuracy=0.8, test_ece=0.02)
    assert rows_of(wider.on_test_data(results_of(low, high))) == {}  # before ours has run
    mine = with_measures(*ours([0.15], TASKS[:1]), test_loss=0.4, test_accuracy=0.7, test_ece=0.03)
    rows = rows_of(wider.on_test_data(results_of(low, high, mine)))
    assert rows == {TASKS[0]: ["0.3 → 0.5 → 0.4", "90.0% → 80.0% → 70.0%", "0.010 → 0.020 → 0.030"]}


def test_one_seed_has_no_spread_and_other_methods_do_not_change_the_initial_loss():
    runs = [record(TASKS[0], "mechanic adamw", 1.0, falling(loss, 1), seed) for seed, loss in enumerate((0.1, 0.2))]
    base, other = grid(TASKS[0], [0.0]), record(TASKS[0], "schedule-free adamw", 1.0, falling(0.5, 1))
    other["curve"]["train_loss"][0] = 2.0  # statistics of batch norms that were recomputed
    assert rows_of(tables.per_task(results_of(*base, runs[0], other)))[TASKS[0]][1] == "10.0"
    assert rows_of(tables.per_task(results_of(*base, *runs, other)))[TASKS[0]][1] == "15.0 ± 5.0"


def test_errors_are_counted_and_left_out_of_the_means():
    names = {"sgd": (0.1, 0.0, 3), "mechanic sgd": (1.0, 0.1, 3), "d-adaptation sgd": (1.0, 0.1, 2)}
    records = [
        record_of(Run("convex-iris", name, lr, seed), loss)
        for name, (lr, loss, seeds) in names.items()
        for seed in range(seeds)
    ]
    broken = {**vars(Run("convex-iris", "d-adaptation sgd", 1.0, 2)), "error": "ValueError: no", "curve": {}}
    results = Results({run_of(each): each for each in [*records, broken]})
    assert results.rho("convex-iris", "d-adaptation sgd", "sgd") == pytest.approx([0.1, 0.1])
    rows = rows_of(tables.summary(results))
    assert rows["D-Adaptation"][-1] == "1 (d-adaptation sgd)"
    assert rows["Mechanic"][-1] == "0"
    alone = Results({run_of(each): each for each in [*records[:6], broken]})
    assert rows_of(tables.summary(alone))["D-Adaptation"][0] == "0"
