"""The settings of the tuner."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class TunerConfig:
    """How the scale is learned. The defaults are meant to be left alone.

    Args:
        betas: one scale is learned per beta, and S is their sum. Smaller betas forget faster. Default: five, from 0.99
            to 0.999999.
        s_init: the initial stake. With ``relative_start`` it is the fraction of ``|x_1|`` by which the stake may move
            the parameters before anything has been learned; otherwise it is the first scale itself. Default: 0.01.
        relative_start: measure ``s_init`` against the norm of the parameters, and let the stake grow where training
            starts on a plateau. Default: True.
        decay: the paper's lambda. It keeps S from running away at a large S. Default: 0.001.
        late_decay: the same, without the factor S, once the gradient is below a fiftieth of its largest norm. Then the
            train data are memorized, and parameters that go on growing would still lower the train loss, but
            raise the test loss. Default: 0.1.
        eps: added to sqrt(v). Where sqrt(v) is 0 nothing is divided, so it is not needed. Default: 0.
        guard: let the parameters fall back by at most half of their distance from the start per step, so that one bad
            batch cannot undo a run. Default: True.
        forgetting: while S is larger than ever before, forget part of what was moved at a smaller S: up to this many
            parts in t + 50 of Delta on step t. 0 keeps all of it, as the paper does. Default: 4.
        settle: let a schedule calm all movement. If the learning rate has fallen to a fraction of its peak, S changes
            only by that fraction, and what Delta has moved so far follows S only by that fraction, within the limit
            of ``forgetting``. Without it a learning rate of 0 still moves the parameters. Whatever the schedule, S
            changes more slowly from step 1,000 on. Default: True.
        min_lr: S is kept at this value or above it, from the first step on. S is the effective learning rate at the
            peak of the schedule, so the schedule may still go below. Default: 0, no floor.
        max_lr: S is kept at this value or below it. Default: infinity, no cap.

    Example:
        >>> TunerConfig(decay=0.1).decay
        0.1
        >>> TunerConfig.paper().s_init
        1e-08
    """

    betas: tuple[float, ...] = (0.99, 0.999, 0.9999, 0.99999, 0.999999)
    s_init: float = 0.01
    relative_start: bool = True
    decay: float = 0.001
    late_decay: float = 0.1
    eps: float = 0.0
    guard: bool = True
    forgetting: float = 4.0
    settle: bool = True
    min_lr: float = 0.0
    max_lr: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))
        if not self.betas or not all(0.0 <= beta <= 1.0 for beta in self.betas):
            raise ValueError(f"betas must be one or more numbers in [0, 1], got {self.betas}")
        if not (self.s_init > 0 and math.isfinite(self.s_init)):
            raise ValueError(f"s_init must be positive and finite, or S never leaves 0, got {self.s_init}")
        for name in ("decay", "late_decay", "eps", "forgetting"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be non-negative and finite, got {value}")
        if not (0 <= self.min_lr <= self.max_lr and self.min_lr < math.inf and self.max_lr > 0):
            raise ValueError(f"0 <= min_lr <= max_lr must hold, and 0 < max_lr, got {self.min_lr} and {self.max_lr}")

    @property
    def has_bounds(self) -> bool:
        """Whether ``min_lr`` or ``max_lr`` is set."""
        return self.min_lr > 0 or self.max_lr < math.inf

    @classmethod
    def paper(cls) -> TunerConfig:
        """The published algorithm: its betas and decay, an absolute first scale of 1e-8, and none of what was added.

        What stays is what the printed text cannot run without: ``|h|`` in the running maximum, the
        reward of the scale in force, and a stored Delta.
        """
        return cls(
            betas=(0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999),
            s_init=1e-8,
            relative_start=False,
            decay=0.01,
            late_decay=0.0,
            eps=1e-8,
            guard=False,
            forgetting=0.0,
            settle=False,
        )

    @classmethod
    def starting_at(cls, lr: float) -> TunerConfig:
        """The defaults, with ``lr`` as the first scale: a warm start from what an earlier run has learned.

        S leaves it as soon as the gradients ask for another. If it is too large by far, the first steps can spoil the
        run, so take less of it for a task that is not the same.

        Example:
            >>> TunerConfig.starting_at(0.003).s_init
            0.003
        """
        return cls(s_init=lr, relative_start=False)

    @classmethod
    def of(cls, config: TunerConfig | Mapping[str, Any] | None) -> TunerConfig:
        """Accept what a user may pass for ``config``: nothing, a config, or a plain mapping."""
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise TypeError(f"config must be a TunerConfig or a dict of its fields, got {config!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(config) - known):
            raise TypeError(f"config has no field {', '.join(unknown)}; the fields are {', '.join(sorted(known))}")
        return cls(**config)
