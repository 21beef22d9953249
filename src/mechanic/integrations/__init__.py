"""Small pieces for frameworks. Each module imports its framework, and nothing here is imported unless asked for."""

from __future__ import annotations

from typing import Any

from mechanic.torch import Mechanic

__all__ = ["readings"]


def readings(optimizer: Any) -> dict[str, float]:
    """What to log, as plain numbers: S, the learned rate, which is its mean, and the effective learning rate of
    the last step, of every tuner, and how many steps so far had gradients that were not finite.

    Args:
        optimizer: a Mechanic, or what a framework has wrapped around one (Accelerate, Lightning).

    Example:
        >>> import torch
        >>> from mechanic.integrations import readings
        >>> from mechanic.torch import Mechanic
        >>> optimizer = Mechanic(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0))
        >>> readings(optimizer)
        {'mechanic/scale': 0.0, 'mechanic/learned': 0.0, 'mechanic/lr': 0.0, 'mechanic/nonfinite_steps': 0}

    If there are several tuners, or one that was given a name, the names follow: ``mechanic/scale/unet``.
    """
    mechanic = optimizer
    while not isinstance(mechanic, Mechanic):
        if not hasattr(mechanic, "optimizer"):
            raise TypeError(f"there is no Mechanic to read in {type(optimizer).__name__}; wrap the optimizer first")
        mechanic = mechanic.optimizer
    columns = {"scale": mechanic.scales(), "learned": mechanic.learned_rates(), "lr": mechanic.learning_rates()}
    alone = list(columns["scale"]) in (["default"], ["group 0"])
    by_key = {
        f"mechanic/{column}" if alone else f"mechanic/{column}/{tuner}": value
        for column, by_tuner in columns.items()
        for tuner, value in by_tuner.items()
    }
    return {**by_key, "mechanic/nonfinite_steps": mechanic.nonfinite_steps}
