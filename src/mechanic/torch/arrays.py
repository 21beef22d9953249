"""torch as the tuner's array module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def array_module(device: torch.device) -> Any:
    """What :func:`mechanic.tuner.update` is to calculate with, for one step."""
    return torch if device.type == "cpu" else FewerLaunches()


class FewerLaunches:
    """torch with the same results in fewer launches: off the CPU they are all that a tuner's small arrays cost."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[float, torch.dtype], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def where(self, condition: Tensor, first: Tensor, second: Tensor | float) -> Tensor:
        """torch fills a tensor with a number every time that it is given one."""
        if not isinstance(second, Tensor):
            key = second, first.dtype
            if key not in self._numbers:
                self._numbers[key] = first.new_full((), second)
            second = self._numbers[key]
        return torch.where(condition, first, second)

    def isfinite(self, array: Tensor) -> Tensor:
        """torch takes four launches."""
        return array - array == 0
