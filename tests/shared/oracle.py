"""Algorithm 1 of the paper, line by line in NumPy float64: what every implementation is held against.

Each line carries the number of the paper's line. Where the print cannot be taken literally a flag says so;
``Departures.none()`` is the print. Nothing is shared with the library but the paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
OUR_BETAS = (0.99, 0.999, 0.9999, 0.99999, 0.999999)
EPSILON = 1e-8
PAPERS_NUMBERS = {"betas": (0.9, *OUR_BETAS), "lam": 0.01, "s_init": 1e-8}


@dataclasses.dataclass(frozen=True)
class Departures:
    """Where we leave the print; the reasons are in docs/departures.md."""

    absolute_feedback: bool = True  # line 11: |h|, not h
    stored_delta: bool = True  # line 8 skipped
    reward_of_scale_in_force: bool = True  # line 13: s_t, not s_{t-1}
    late_decay: bool = True  # line 10: another pull, if the gradient is tiny beside the largest one
    relative_start: bool = True  # line 15: s_init is a fraction of |x_1| / max |Delta|
    growing_stake: bool = True  # line 15: s_init grows while nothing speaks against Delta, and shrinks again
    no_epsilon: bool = True  # line 16: nothing is added to sqrt(v)
    guard: bool = True  # after line 16: S times the largest |Delta| falls by at most one half
    forgetting: bool = True  # line 9: a part of Delta is let go while S is larger than ever
    # After the guard: S goes lr / max lr of its way, or 1000 / t if that is less; line 9: Delta makes up for the rest.
    settling: bool = True
    idle_steps_kept: bool = True  # lines 10-16 skipped where the gradient is zero or not finite

    @classmethod
    def none(cls) -> Departures:
        return cls(*([False] * len(dataclasses.fields(cls))))

    @classmethod
    def only_what_must_be(cls) -> Departures:
        """``TunerConfig.paper()``."""
        ours = "late_decay", "relative_start", "growing_stake", "no_epsilon", "guard", "forgetting", "settling"
        return cls(**dict.fromkeys(ours, False))


class Oracle:
    """Algorithm 1 around a base, a function (x_t, g_t) -> u_t that has an ``lr`` by its step ``t``."""

    def __init__(
        self,
        base: SGD | AdamW | Lion,
        x: npt.ArrayLike,
        *,
        betas: tuple[float, ...] = OUR_BETAS,
        lam: float = 0.001,
        s_init: float = 0.01,
        bounds: tuple[float, float] = (0.0, np.inf),
        own_iterates: bool = False,
        departures: Departures | None = None,
    ) -> None:
        self.base, self.lam, self.s_init, self.bounds = base, lam, s_init, bounds  # 1
        self.departures = departures or Departures()
        self.own_iterates = own_iterates  # Theorem 1: the base steps on x_ref + Delta
        self.beta, self.n = np.array(betas), len(betas)
        self.v, self.r, self.m = (np.zeros(self.n) for _ in range(3))  # 2
        self.x = self.x_ref = np.array(x, dtype=np.float64)  # 2
        self.delta = np.zeros_like(self.x)  # 3
        self.s = self.s_before = np.zeros(self.n)  # 4
        self.largest_delta = self.initial_norm = self.largest_scale = 0.0
        self.largest_rate = self.largest_gradient = 0.0
        self.stake = 1.0
        self.t = 0
        self.rates = self.moved = 0.0

    @property
    def learned_rate(self) -> float:
        """The mean of S since step 50, weighted with the learning rates of the steps; until then S."""
        return self.moved / self.rates if self.rates else self.scale

    @property
    def scale(self) -> float:
        return float(self.s.sum())

    def step(self, g: Floats, observed: Floats | None = None) -> None:
        """One pass of the loop, line 5, with the gradient of line 6; or another one as the feedback of line 10."""
        d, x = self.departures, self.x
        u = self.base(self.x_ref + self.delta if self.own_iterates else x, g)  # 7
        delta = self.delta if d.stored_delta else (x - self.x_ref) / (self.scale + EPSILON)  # 8
        feedback = g if observed is None else observed
        kept = 1.0
        if not (d.idle_steps_kept and not (np.isfinite(feedback).all() and feedback.any())):
            unit = self._move_into_bounds() if d.forgetting and not self.own_iterates else 1.0
            scale = self.scale
            self._tune(feedback, x, unit * delta)
            rate = self.base.lr(self.base.t - 1) if self.t >= 50 else 0.0
            self.rates, self.moved = self.rates + rate, self.moved + rate * self.scale
            kept = unit * self._delta_retention(scale)
        self.delta = kept * delta + u  # 9
        self.x = self.x_ref + self.scale * self.delta  # 17

    def _move_into_bounds(self) -> float:
        """S of a run that goes on with other bounds is brought within them, and Delta is larger by as much."""
        if self.scale == 0:
            return 1.0
        unit = self.scale / min(max(self.scale, self.bounds[0]), self.bounds[1])
        self.s, self.largest_scale = self.s / unit, self.largest_scale / unit
        self.m, self.v, self.largest_delta = self.m * unit, self.v * unit**2, self.largest_delta * unit
        return unit

    def _tune(self, g: Floats, x: Floats, delta: Floats) -> None:
        d, norm = self.departures, np.linalg.norm
        most = 2 * self.largest_gradient or np.inf  # of one gradient
        self.largest_gradient = max(self.largest_gradient, min(float(norm(g)), most))
        lam = self.lam * self.scale
        if d.late_decay:
            lam += 0.1 * max(0.0, 1 - 50 * float(norm(g)) / self.largest_gradient)
        pull = lam * norm(g) * x / norm(x) if norm(x) > 0 else 0.0 * x
        h = float(np.vdot(delta, g + pull))  # 10
        m, v = self.m, self.v
        self.m = np.maximum(self.beta * self.m, abs(h) if d.absolute_feedback else h)  # 11
        self.v = self.beta**2 * self.v + h**2  # 12
        self.r = self.beta * self.r - (self.s if d.reward_of_scale_in_force else self.s_before) * h  # 13
        self.r = np.maximum(0, self.r)  # 14
        largest_before = self.largest_delta
        self.largest_delta = max(largest_before, float(norm(delta)))
        rise = self._share(self.m, self.v) / self._share(m, v) if h > 0 and m.any() else 1.0
        wealth = self._s_init(g, x, rise) * self.m / self.n + self.r  # 15
        root = np.sqrt(self.v) + (0.0 if d.no_epsilon else EPSILON)
        s = wealth / np.where(root > 0, root, 1.0)  # 16
        floor = self.scale / 2 * (largest_before / self.largest_delta if self.largest_delta > 0 else 1.0)
        if d.guard and s.sum() < floor:
            s = s + (floor - s.sum()) / self.n
        self.largest_rate = max(self.largest_rate, self.base.lr(self.base.t - 1))
        if d.settling:
            s = self.s + min(self._pace(), 1000 / min(self.t + 1, 50_000)) * (s - self.s)
        lowest, highest = self.bounds
        if s.sum() > highest:
            s = s * highest / s.sum()
        elif s.sum() < lowest:
            s = s * lowest / s.sum() if s.sum() > 0 else np.full(self.n, lowest / self.n)
        self.s_before, self.s = self.s, s

    def _delta_retention(self, scale: float) -> float:
        former, t = self.largest_scale, self.t
        self.largest_scale, self.t = max(former, self.scale), t + 1
        if not self.departures.forgetting or self.own_iterates or former == 0:
            return 1.0
        if self.largest_scale > former:
            return max(former / self.largest_scale, 1 - 4 / (t + 50))
        if not self.departures.settling or scale == 0 or self.scale == 0:
            return 1.0
        most = (1 - self._pace()) * 4 / (t + 50)
        return min(max(scale / self.scale, 1 - most), 1 + most)

    def _pace(self) -> float:
        rate = self.base.lr(self.base.t - 1)  # of the step that line 7 took
        return max(rate, 0.0) / self.largest_rate if self.largest_rate > 0 else 0.0

    @staticmethod
    def _share(m: Floats, v: Floats) -> float:
        return float(np.mean(m / np.sqrt(v)))

    def _s_init(self, g: Floats, x: Floats, rise: float) -> float:
        if not self.departures.relative_start:
            return self.s_init
        if self.initial_norm == 0:
            self.initial_norm = float(np.linalg.norm(x)) or 1.0
        if self.largest_delta == 0:
            return 0.0
        first = self.s_init * self.initial_norm / self.largest_delta
        if self.departures.growing_stake:
            self._change_stake(float(np.linalg.norm(g)), first, rise)
        return first * self.stake

    def _change_stake(self, gradient: float, first: float, rise: float) -> None:
        factor = 1.0
        if self.r[np.argmin(self.beta)] == 0:
            factor = 1 / 1.1
        elif self.r.sum() < 100 * first * self.m.mean() and gradient > 0.2 * self.largest_gradient:
            factor = 1.1
        self.stake = min(max(self.stake * factor / max(rise, 1.0), 1.0), 1e4)


# Bases, written here once more so that no line of torch is trusted. Each takes lr as a function of the step.


class SGD:
    def __init__(self, lr: Callable[[int], float], momentum: float = 0.0) -> None:
        self.lr, self.momentum, self.t, self.buffer = lr, momentum, 0, 0.0

    def __call__(self, x: Floats, g: Floats) -> Floats:
        self.buffer = g if self.t == 0 else self.momentum * self.buffer + g
        self.t += 1
        return -self.lr(self.t - 1) * self.buffer


class AdamW:
    def __init__(self, lr: Callable[[int], float], weight_decay: float = 0.01) -> None:
        self.lr, self.weight_decay, self.t = lr, weight_decay, 0
        self.first, self.second = 0.0, 0.0

    def __call__(self, x: Floats, g: Floats) -> Floats:
        lr = self.lr(self.t)
        self.t += 1
        self.first = 0.9 * self.first + 0.1 * g
        self.second = 0.999 * self.second + 0.001 * g**2
        first, second = self.first / (1 - 0.9**self.t), self.second / (1 - 0.999**self.t)
        return -lr * (self.weight_decay * x + first / (np.sqrt(second) + 1e-8))


class Lion:
    def __init__(self, lr: Callable[[int], float], weight_decay: float = 0.0) -> None:
        self.lr, self.weight_decay, self.t, self.momentum = lr, weight_decay, 0, 0.0

    def __call__(self, x: Floats, g: Floats) -> Floats:
        direction = np.sign(0.9 * self.momentum + 0.1 * g)
        self.momentum = 0.99 * self.momentum + 0.01 * g
        self.t += 1
        return -self.lr(self.t - 1) * (direction + self.weight_decay * x)
