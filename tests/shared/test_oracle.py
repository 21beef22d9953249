"""What the printed paper does when taken literally, and that each departure is needed."""

import numpy as np
import pytest

from tests.shared.oracle import PAPERS_NUMBERS, SGD, Departures, Oracle

EIGENVALUES = np.logspace(-2, 0, 20)


def train(steps, **changes):
    """A quadratic with eigenvalues from 1/100 to 1, started at all ones; returns the oracle."""
    oracle = Oracle(SGD(lambda t: 1.0), np.ones(20), **changes)
    for _ in range(steps):
        oracle.step(EIGENVALUES * oracle.x)
    return oracle


def loss(oracle):
    return float((EIGENVALUES * oracle.x**2).sum() / EIGENVALUES.sum())


def test_the_printed_algorithm_never_moves():
    oracle = train(200, **PAPERS_NUMBERS, departures=Departures.none())
    assert oracle.scale == 0
    assert (oracle.x == 1).all()


@pytest.mark.parametrize("flaw", ["absolute_feedback", "stored_delta"])
def test_either_flaw_of_the_print_alone_keeps_it_from_moving(flaw):
    sound = vars(Departures.only_what_must_be())
    oracle = train(200, **PAPERS_NUMBERS, departures=Departures(**{**sound, flaw: False}))
    assert (oracle.x == 1).all()
    assert loss(train(200, **PAPERS_NUMBERS, departures=Departures(**sound))) < 0.5


def test_reward_of_the_former_scale_is_worse():
    sound = vars(Departures.only_what_must_be())
    former = Departures(**{**sound, "reward_of_scale_in_force": False})
    assert loss(train(500, **PAPERS_NUMBERS, departures=former)) > loss(
        train(500, **PAPERS_NUMBERS, departures=Departures(**sound))
    )


def test_the_default_moves_by_the_third_step_and_learns_faster_than_the_paper():
    assert train(3).scale > 0
    paper = train(500, **PAPERS_NUMBERS, departures=Departures.only_what_must_be())
    assert loss(paper) == pytest.approx(1.7e-2, rel=0.05)
    assert loss(train(500)) < loss(paper) / 2
