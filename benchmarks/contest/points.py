"""The knobs that are searched, their ranges, and the points that are tried: the same for every method."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torch.quasirandom import SobolEngine

POINTS = 64
SEED = 0
Point = Mapping[str, float]


@dataclass(frozen=True)
class Knob:
    """A number between two, even in its logarithm, or one of a few; 0 for a share of the points where it says so."""

    name: str
    low: float = 0.0
    high: float = 0.0
    zeros: float = 0.0
    choices: tuple[float, ...] = ()

    def at(self, share: float) -> float:
        """The value at a share of the way, from 0 up to, but without, 1."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        if share < self.zeros:
            return 0.0
        share = (share - self.zeros) / (1 - self.zeros)
        return float(f"{self.low * (self.high / self.low) ** share:.3g}")

    def __str__(self) -> str:
        if self.choices:
            return ", ".join(f"{choice:g}" for choice in self.choices)
        return f"{self.low:g} … {self.high:g}" + (f", and 0 for {self.zeros:.1%} of the points" if self.zeros else "")


SHARED = (
    Knob("1-beta1", 0.02, 0.5),
    Knob("1-beta2", 0.001, 0.2),
    Knob("weight_decay", 1e-3, 1.0, zeros=1 / 8),
    Knob("warm_up", choices=(0.0, 0.02, 0.05, 0.1)),  # a share of the steps
)


@functools.cache
def shares() -> list[list[float]]:
    """A scrambled Sobol sequence. One more coordinate than are shared, for the knob that a method may have besides.

    All methods take the same, so that none has better luck with its betas than another.
    """
    return SobolEngine(len(SHARED) + 1, scramble=True, seed=SEED).draw(POINTS).tolist()


def points(own: Knob | None) -> list[Point]:
    """The points of a method with this knob besides the shared ones, or with none."""
    knobs = [*SHARED, *([own] if own else [])]
    return [{knob.name: knob.at(share) for knob, share in zip(knobs, at, strict=False)} for at in shares()]
