"""What ``mechanic run`` was asked for. It is pickled to the processes that a script spawns."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of ``mechanic run``."""

    only: tuple[str, ...] = ()  # class names, or dotted paths; empty for all
    per_group: bool = False
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    log: str | None = None
    every: int = 10  # steps between two lines of the log
    probe: int | None = None  # how many steps to make
