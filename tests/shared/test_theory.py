"""The corrected Algorithm 2 satisfies the proof's explicit inequalities, whatever the feedback."""

import numpy as np
import pytest

from mechanic.theory import potential, run_tuner

ROUNDS = 300


def adversary(seed: int, wealth: float) -> np.ndarray:
    """Feedback chosen after seeing the scale: it lets the tuner win for a while, then strikes where it hurts most."""
    rng = np.random.default_rng(seed)
    feedback = [-1.0]
    for t in range(1, ROUNDS // 2):
        scale_in_force = run_tuner([*feedback, 0.0], wealth).scales[-1]
        winning = t % 40 < 25 + 10 * rng.random()
        size = rng.choice([0.3, 1.0, 3.0])
        feedback.append(-size if winning or scale_in_force == 0 else size * 10 ** rng.integers(0, 3))
    return np.array(feedback)


def random_feedback(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    drift = rng.normal()
    heavy_tails = rng.standard_t(df=2, size=ROUNDS)
    return (heavy_tails + drift) * 10 ** rng.uniform(-4, 4)


def shapes(seed: int) -> list[np.ndarray]:
    t = np.arange(1, ROUNDS + 1)
    return [
        random_feedback(seed),
        -np.ones(ROUNDS),
        np.ones(ROUNDS),
        np.where(t % 2, -1.0, 1.0),
        -(1.01**t),  # ever larger
        -(0.97**t),  # dying away
        np.where(t < ROUNDS, -1.0, 1e6),  # one blow at the end
        np.zeros(ROUNDS),
    ]


@pytest.mark.parametrize("wealth", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("seed", range(5))
def test_the_proofs_inequalities_hold(seed, wealth):
    for feedback in [*shapes(seed), adversary(seed, wealth)]:
        trace = run_tuner(feedback, wealth)
        m, v, hat = trace.largest_feedback, trace.variance, trace.clipped

        loss = (feedback * trace.scales).sum()
        bound = wealth + trace.scales.max() * m[-1]
        assert loss <= bound * (1 + 1e-9)

        assert (trace.wealth > 0).all()
        spread = 4 * m[:-1] ** 2 + v[:-1]
        spent = np.divide(2 * hat**2, spread, out=np.zeros_like(hat), where=spread > 0).sum()
        final_spread = np.sqrt(4 * m[-1] ** 2 + v[-1])
        grown = potential(-hat.sum() / final_spread) if final_spread > 0 else 0.0
        assert np.log(trace.wealth[-1]) >= np.log(wealth) + grown - spent - 1e-9


def test_a_sure_win_is_taken():
    """The inequalities would hold for a tuner that never bets; this one does."""
    assert run_tuner(-np.ones(ROUNDS), 1.0).wealth[-1] > 1e6
