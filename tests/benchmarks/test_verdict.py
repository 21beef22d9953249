"""The page of the verdict: its tables from made-up records, and no number on it that is not from a table."""

import re

import pytest

pytest.importorskip("ray")
from benchmarks.contest import choice, plan
from benchmarks.contest.methods import DEFAULTS, METHODS, OURS
from benchmarks.contest.tasks import JUDGED, TASKS
from benchmarks.report import figures, verdict
from benchmarks.report.verdict import Judgement
from benchmarks.suite.measure import evaluation_steps
from tests.benchmarks.runs import DOCS, rows_of

REACHED_AT = {OURS: 10, "adamw": 5, "nadamw": 18, "prodigy": 99}  # of 20 evaluations; the others with the first


def made_up(run):
    """In the search point 3 is everybody's best. When judged, the loss falls to 1 at an evaluation of the method's.

    With the defaults it falls to 2. Ours costs twice as much.
    """
    task, (method, number) = TASKS[run.task], run.contender.split(" #")
    evaluated = evaluation_steps(task)
    if run.task.endswith("-search"):
        low, at = (1.0 if number == "3" else 2.0), 3
    else:
        low, at = (2.0 if int(number) == DEFAULTS else 1.0), REACHED_AT.get(method, 1)
    losses = [low if index >= at else 3.0 for index in range(len(evaluated))]
    cost = (2.0 if method == OURS else 1.0) * task.steps
    return {**vars(run), "evaluated": evaluated, "cpu_seconds": cost, "curve": {"test_loss": losses}}


@pytest.fixture(scope="module")
def records():
    found = {run: made_up(run) for run in plan.search_runs()}
    points = choice.chosen(found)
    assert set(points.values()) == {3}
    return found | {run: made_up(run) for run in plan.judged_runs(points)}


def test_the_scores_are_what_the_hand_computes(records):
    judgement = Judgement(records)
    found = judgement.areas(judgement.calibrated().values(), ["3of3"], 0.02, "steps")
    # The fastest reach it with evaluation 1 of 20. Ours needs 10 times that, so nothing; AdamW 5 times.
    assert found["schedule-free #3"] == [1.0] * len(JUDGED)
    assert found["mechanic #3"] == found["adamw #3"] == found["prodigy #3"] == [0.0] * len(JUDGED)
    few = ["mechanic #3", "adamw #3", "nadamw #3", "prodigy #3"]
    by_steps = judgement.areas(few, ["3of3"], 0.02, "steps")
    # 10 / 5 and 18 / 5 times as long: (4 - 2) / 3 and (4 - 3.6) / 3.
    assert [by_steps[name][0] for name in few] == pytest.approx([2 / 3, 1.0, 0.4 / 3, 0.0], abs=0.02)
    by_time = judgement.areas(few, ["3of3"], 0.02, "cpu_seconds")
    assert by_time["mechanic #3"][0] == pytest.approx(0.0, abs=0.02)  # twice the time of a step


def test_every_table_of_a_whole_contest_is_filled(records):
    judgement = Judgement(records)
    for name, make in verdict.TABLES.items():
        text = make(judgement)
        assert text.count("\n") >= 2 or name == "verdict", name
        assert "nan" not in text, name
    assert len(rows_of(verdict.chosen_points(judgement))) == len(METHODS)
    differences = rows_of(verdict.differences(judgement))
    assert differences["D-Adaptation"][0] == "+1.00 [+1.00, +1.00]"
    assert differences["Prodigy"][0] == "+0.00 [+0.00, +0.00]"
    said = verdict.sentence(judgement)
    assert said.startswith("By steps, Schedule-Free AdamW has the best score, 1.00 [1.00, 1.00]. ")
    assert "Mechanic is number 4 of 7, with 0.00 [0.00, 0.00]. Clearly ahead of Mechanic: Schedule-Free AdamW, " in said
    assert "D-Adaptation. Clearly behind it: no method. By time, " in said
    assert said.endswith("found setting has 0.00 [0.00, 0.00] by steps, and its defaults have 0.00 [0.00, 0.00].")
    assert rows_of(verdict.final_losses(judgement))[JUDGED[0]][:2] == ["1.02", "1 – 3/3"]
    parts = rows_of(verdict.by_task(judgement))[JUDGED[0]]
    assert parts == [f"{area:.2f}" for area in (0, 0, 0, 1, 0, 1, 1)]  # in the order of the methods
    defaults = rows_of(verdict.defaults(judgement))
    assert defaults["D-Adaptation"][0] == "1.00 [1.00, 1.00] → 0.00 [0.00, 0.00]"


def test_the_profiles_are_drawn_where_there_is_a_score(records):
    figure = figures.contest(Judgement(records))
    lines = {line.get_label(): set(line.get_ydata()) for line in figure.axes[0].get_lines()}
    assert lines.keys() == {method.label for method in METHODS.values()}
    assert (lines["Schedule-Free AdamW"], lines["Prodigy"]) == ({1.0}, {0.0})  # the fastest, and never at the target
    figures.plt.close(figure)
    assert figures.contest(Judgement({})) is None


def test_without_records_or_with_some_no_table_fails(records):
    searching = {run: record for run, record in records.items() if run.task.endswith("-search")}
    one_task = {run: record for run, record in records.items() if run.task.startswith((JUDGED[0], "mlp-sin"))}
    for some in ({}, searching, {**searching, **one_task}):
        judgement = Judgement(some)
        assert not any("nan" in make(judgement) for make in verdict.TABLES.values())
        assert verdict.sentence(judgement).startswith("Nothing yet")


def test_what_raises_or_is_not_run_reaches_nothing(records):
    whole = records[plan.run_with(f"{JUDGED[0]}-3of3", "adamw", 3, 0)]
    assert verdict._time_to(2.0, whole, "steps") < float("inf")
    assert verdict._time_to(2.0, whole | {"error": "ValueError: no"}, "steps") == float("inf")
    assert verdict._time_to(2.0, whole | {"curve": {}}, "cpu_seconds") == float("inf")


def test_the_page_asks_for_every_table_and_its_text_has_no_number_of_its_own():
    text = (DOCS / "verdict.md").read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- table: (.+) -->", text)) == verdict.TABLES.keys()
    written = re.sub(r"<!-- table: .*?<!-- end -->|```.*?```|\]\(.*?\)", "", text, flags=re.DOTALL)
    assert re.findall(r"\S*\d\S*", written) == []
