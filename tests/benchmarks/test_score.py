"""The contest's score, on numbers that a hand can check."""

import math

import pytest

from benchmarks.contest import score

INF = math.inf


def test_a_target_is_worse_than_the_best_by_a_share_of_it_or_of_the_way_down():
    assert score.target(2.0, 0.05) == pytest.approx(2.1)
    assert score.target(-200.0, 0.05) == pytest.approx(-190.0)  # a loss may be negative, as minus a return
    assert score.target(2.0, 0.05, initial=4.0) == pytest.approx(2.1)
    assert score.target(0.0, 0.02, initial=1.0) == pytest.approx(0.02)


def test_a_time_is_that_of_the_first_evaluation_at_the_target():
    steps = [0, 10, 20, 30]
    assert score.time_to(1.0, steps, [3.0, 1.5, 1.0, 1.2]) == 20
    assert score.time_to(0.9, steps, [3.0, 1.5, 1.0, 1.2]) == INF
    assert score.time_to(1.0, steps, [3.0, None]) == INF  # diverged
    assert score.time_to(1.0, steps, []) == INF  # raised


def test_a_target_is_reached_where_most_seeds_reach_it():
    assert score.over_seeds([10, INF, 30]) == 30
    assert score.over_seeds([10, INF, INF]) == INF
    assert score.over_seeds([30, 10, 20]) == 20
    assert score.over_seeds([]) == INF


def test_times_are_compared_with_the_fastest():
    assert score.ratios({"a": 10.0, "b": 25.0, "c": INF}) == {"a": 1.0, "b": 2.5, "c": INF}
    assert score.ratios({"a": INF, "b": INF}) == {"a": INF, "b": INF}
    assert score.ratios({"a": 0.0, "b": 0.0, "c": 1.0}) == {"a": 1.0, "b": 1.0, "c": INF}


def test_the_area_is_that_under_the_profile():
    assert [score.area(ratio) for ratio in (1.0, 2.5, 4.0, 7.0, INF)] == pytest.approx([1.0, 0.5, 0.0, 0.0, 0.0])
    assert score.profile([1.0, 2.5, INF, 1.0], [1.0, 2.0, 2.5, 4.0]) == [0.5, 0.5, 0.75, 0.75]
    # By hand: 3/4 of the tasks from 2.5 to 4, 1/2 from 1 to 2.5.
    assert sum(map(score.area, [1.0, 2.5, INF, 1.0])) / 4 == pytest.approx((0.75 * 1.5 + 0.5 * 1.5) / 3)


def test_areas_are_by_method_with_a_part_per_task():
    times = [{"a": 10.0, "b": 25.0}, {"a": INF, "b": 7.0}, {"a": INF, "b": INF}]
    assert score.areas(times) == {"a": [1.0, 0.0, 0.0], "b": [0.5, 1.0, 0.0]}
    assert score.areas([]) == {}


def test_an_interval_is_of_the_mean_and_repeats():
    found = score.interval([0.0, 1.0] * 50)
    assert found.mean == 0.5
    # The mean of 100 coins has a standard deviation of .05, and 95 % lie within 1.96 of it.
    assert (found.low, found.high) == pytest.approx((0.402, 0.598), abs=0.011)
    assert score.interval([0.0, 1.0] * 50) == found
    assert score.interval([0.3] * 5) == pytest.approx((0.3, 0.3, 0.3))
    assert all(map(math.isnan, score.interval([])))


def test_a_difference_is_paired_by_task():
    ours, theirs = [0.1, 0.9, 0.5], [0.2, 1.0, 0.6]
    assert score.difference(theirs, ours) == pytest.approx((0.1, 0.1, 0.1))  # though both vary from task to task
    with pytest.raises(ValueError):
        score.difference([1.0], [1.0, 2.0])
