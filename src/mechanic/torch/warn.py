"""Warnings that point at the user's line."""

from __future__ import annotations

import inspect
import warnings


def warn_user(message: str) -> None:
    """Warn, with the line of the first caller outside of Mechanic and PyTorch."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("mechanic", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class WarnOnce:
    """The warnings of one optimizer, each given once."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def __call__(self, topic: str, message: str) -> None:
        if topic not in self._topics:
            self._topics.add(topic)
            warn_user(message)
