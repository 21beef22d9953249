"""An endless order of samples that can be continued where it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Shuffled:
    """So many of the rows at a time, without end, shuffled anew for every epoch. The rest of an epoch is left out."""

    def __init__(self, rows: Tensor, size: int, generator: torch.Generator) -> None:
        self.rows, self.size, self.generator = rows, size, generator
        self._order, self._position = rows[:0], 0

    def __iter__(self) -> Shuffled:
        return self

    def __next__(self) -> Tensor:
        if self._position + self.size > len(self._order):
            self._order, self._position = self.rows[torch.randperm(len(self.rows), generator=self.generator)], 0
        self._position += self.size
        return self._order[self._position - self.size : self._position]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "position": self._position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._position = state["order"], state["position"]
        self.generator.set_state(state["generator"])
