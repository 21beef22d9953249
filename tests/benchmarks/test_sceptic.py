"""The figures that a sceptic asks for, from made-up records that a hand can check."""

import pytest

from benchmarks.report import sceptic
from tests.benchmarks.made_up import TASKS, falling, grid, record, results_of, rows_of


def test_the_fixed_rate_of_a_task_is_chosen_on_all_others():
    # The third task likes another rate than the first two, which decide for it, and it takes part in theirs.
    found = sceptic.fixed_rate(
        results_of(
            *grid(TASKS[0], [0.0, 0.2, 0.6]), *grid(TASKS[1], [0.0, 0.1, 0.6]), *grid(TASKS[2], [0.5, 0.35, 0.0])
        ),
        "adamw",
    )
    # Without the first: 1 has 0 + .5, 2 has .1 + .35, 3 has .6 + 0. Without the second: .5, .55, .6.
    assert found == pytest.approx({TASKS[0]: 0.2, TASKS[1]: 0.0, TASKS[2]: 0.5})


def test_a_rate_that_was_not_run_everywhere_is_no_fixed_rate():
    found = sceptic.fixed_rate(results_of(*grid(TASKS[0], [0.5, 0.4, 0.0]), *grid(TASKS[1], [0.2, 0.0])), "adamw")
    assert found == pytest.approx({TASKS[0]: 0.4, TASKS[1]: 0.0})
    assert sceptic.fixed_rate(results_of(*grid(TASKS[0], [0.5, 0.0])), "adamw") == {}


def test_the_greedy_rate_is_the_best_at_half_time():
    found = sceptic.greedy(results_of(*grid(TASKS[0], [0.3, 0.0], halves=[0.4, 0.9])), "adamw")
    assert found == pytest.approx({TASKS[0]: 0.3})


def test_a_tuned_schedule_free_is_shown_when_all_tasks_have_one():
    records = [each for task in TASKS for each in grid(task, [0.0, 0.5])]
    name = "tuned schedule-free / adamw"
    theirs = [record(task, name, lr, falling(lr, 1)) for task in TASKS for lr in (0.3, 0.1)]
    assert sceptic.schedule_free_tuned(results_of(*records, *theirs[2:]), "adamw") == {}
    found = sceptic.schedule_free_tuned(results_of(*records, *theirs), "adamw")
    assert found == pytest.approx(dict.fromkeys(TASKS, 0.1))


def test_gains_count_as_0_in_the_headline_and_intervals_are_over_tasks():
    records = [each for task in TASKS for each in grid(task, [0.2, 0.5])]
    ours = zip(TASKS, (0.0, 0.2, 0.6), strict=True)
    records += [record(task, "mechanic adamw", 1.0, falling(loss, 1)) for task, loss in ours]
    rows = rows_of(sceptic.headline(results_of(*records)))
    assert rows["Mechanic"][1] == rows["Mechanic"][-1]
    mean, *_ = rows["Mechanic"][1].split()
    assert float(mean) == pytest.approx(100 * 0.5 / 3, abs=0.05)  # 0 where it gained .25
    assert rows["Mechanic"][1].endswith("[0.0, 50.0]")  # three tasks: all of a resample may be the best or the worst
    assert rows["Mechanic"][0] == ""
    assert rows["one learning rate, the best on all other tasks"][1] == "0.0 [0.0, 0.0]"
    assert sceptic.headline(results_of()).count("\n") == 1


def test_the_start_is_compared_with_the_tuned_rates_at_the_same_step():
    records = [record(task, "adamw", 1.0, falling(0.0, 2)) for task in TASKS]  # from 5 % of the steps on
    ours = zip(TASKS, (0.1, 0.5, 2.0), (1, 3, 2), strict=True)
    records += [record(task, "mechanic adamw", 1.0, falling(loss, at)) for task, loss, at in ours]
    cells = rows_of(sceptic.early(results_of(*records)))["Mechanic"]
    assert [cell.split()[0] for cell in cells[:3]] == ["0.0", "70.0", "53.3"]  # .1, 1 and 1; then .1, .5 and 1
    assert cells[3:] == ["", "", ""]


def test_what_is_far_behind_is_listed_with_its_losses_the_worst_first():
    records = [each for task in TASKS for each in grid(task, [0.0, 0.5])]
    ours = zip(TASKS, (0.04, 0.1, 0.2), strict=True)
    records += [record(task, "mechanic adamw", 1.0, falling(loss, 1)) for task, loss in ours]
    rows = rows_of(sceptic.losing(results_of(*records)))
    assert list(rows.items()) == [
        ("convex-glass, AdamW", ["20.0", "1000", "1.00", "0.00", "0.200"]),
        ("convex-wine, AdamW", ["10.0", "1000", "1.00", "0.00", "0.100"]),
    ]


def test_rivals_are_compared_on_the_same_tasks_and_bases():
    records = [each for task in TASKS for each in grid(task, [0.0, 0.5])]
    records += [record(task, "mechanic adamw", 1.0, falling(0.1, 1)) for task in TASKS]
    records += [record(TASKS[0], "prodigy", 1.0, falling(0.3, 1)), record(TASKS[1], "prodigy", 1.0, falling(0.3, 1))]
    rows = rows_of(sceptic.paired(results_of(*records)))
    assert rows == {"Prodigy": ["20.0 [20.0, 20.0]", "2", "0", "2"]}


def test_times_to_the_tuned_loss_are_in_units_of_the_tuned_bases():
    records = []
    # Tuned gets there with evaluation 5, at step 300; ours at 200, at 300, and never.
    for task, at in zip(TASKS, (4, 5, None), strict=True):
        records.append(record(task, "adamw", 1.0, falling(0.0, 5)))
        records.append(record(task, "mechanic adamw", 1.0, falling(0.01, at) if at else falling(0.03, 1)))
    rows = rows_of(sceptic.time_to_target(results_of(*records)))
    # The tuned base has ratios 1.5, 1, 1; areas (4 - 1.5) / 3, 1, 1.
    assert rows["AdamW, tuned"][:2] == ["3 of 3", "1.00"]
    assert rows["AdamW, tuned"][2].startswith("0.94 ")
    assert rows["Mechanic"][:2] == ["2 of 3", f"{(200 / 300 + 1) / 2:.2f}"]
    assert rows["Mechanic"][2].startswith("0.67 ")
    assert rows["Mechanic"][3] == "3 of 3"  # the wider target is above .03
    assert sceptic.time_to_target(results_of()).count("\n") == 1
