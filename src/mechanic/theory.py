"""The tuner that the paper's regret bound is proved for: Algorithm 2, corrected. For study, in NumPy.

No optimizer here uses it; Algorithm 1 is its practical simplification. As printed, Algorithm 2 never
leaves s = 0: its running maximum keeps the sign of h, and the clip of q has the wrong sign for the
proof. Taken here: ``|h|``, ``-q``, and the reward of the scale in force.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Trace(NamedTuple):
    """One run over T rounds. Index t - 1 holds round t for ``scales`` and ``clipped``, index t state t."""

    scales: Floats  # s_t, [T]
    clipped: Floats  # clipped feedback, [T]
    largest_feedback: Floats  # m_t, [T + 1]
    variance: Floats  # v_t, [T + 1]
    wealth: Floats  # W_t, [T + 1]


def run_tuner(feedback: npt.ArrayLike, initial_wealth: float, beta: float = 1.0) -> Trace:
    """Play the corrected Algorithm 2 against a sequence of feedback h_1 ... h_T.

    Example:
        >>> trace = run_tuner([-1.0] * 50, initial_wealth=1.0)
        >>> bool(trace.wealth[-1] > 1.0)  # constant negative feedback is a sure win
        True
    """
    h = np.asarray(feedback, dtype=np.float64)
    rounds = len(h)
    scales, clipped = np.zeros(rounds), np.zeros(rounds)
    m, v = np.zeros(rounds + 1), np.zeros(rounds + 1)
    wealth = np.full(rounds + 1, float(initial_wealth))
    s = q = r = 0.0
    for t in range(1, rounds + 1):
        scales[t - 1] = s
        m[t] = max(beta * m[t - 1], abs(h[t - 1]))
        # Truncated to what was known before the round, so that no round can lose more than half the wealth.
        hat = clipped[t - 1] = np.clip(h[t - 1], -m[t - 1], m[t - 1])
        q = beta * q + hat
        r = beta * r - s * hat
        wealth[t] = initial_wealth + r
        v[t] = beta**2 * v[t - 1] + hat**2
        spread = np.sqrt(4 * m[t] ** 2 + v[t])
        s = wealth[t] / spread * np.clip(-q / spread, 0.0, 1.0) if spread > 0 else 0.0
    return Trace(scales, clipped, m, v, wealth)


def potential(x: float) -> float:
    """The proof's a(x): 0 below 0, x^2/2 up to 1, x - 1/2 beyond."""
    if x <= 0:
        return 0.0
    return x * x / 2 if x <= 1 else x - 0.5
