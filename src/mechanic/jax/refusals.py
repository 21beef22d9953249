"""Arguments that cannot work are refused before anything is computed, with the name of the parameter."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from mechanic.jax.state import MechanicState
from mechanic.tuner import TunerConfig


def refuse_unit(unit: Any) -> None:
    """Raise unless it is one positive number. A traced one is known by its shape only."""
    if isinstance(unit, jax.core.Tracer):
        is_suitable = unit.shape == ()
    else:
        number = np.asarray(unit)
        is_suitable = number.shape == () and number.dtype.kind in "iuf" and bool(0 < number < np.inf)
    if not is_suitable:
        raise ValueError(f"unit must be a positive learning rate, got {unit}")


def refuse_other_labels(state: MechanicState, names: Collection[str]) -> None:
    """Raise where the state was made with other labels."""
    if set(state.scale) != set(names):
        raise ValueError(
            f"the state has tuners named {sorted(state.scale)}, the labels name {sorted(names)}; "
            "pass the labels that the state was made with"
        )


def refuse_other_betas(state: MechanicState, config: TunerConfig) -> None:
    """Raise where the state was made with more or fewer betas: arrays of one column would broadcast."""
    if state.tuner is not None and state.tuner.scales.shape[-1] != len(config.betas):
        raise ValueError(
            f"the state has {state.tuner.scales.shape[-1]} scales per tuner, the config {len(config.betas)} betas; "
            "pass the betas that the state was made with"
        )
