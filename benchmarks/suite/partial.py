"""What a long run has done so far, on disk: a run that was killed continues there, and ends as if it had not been."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.record import Run

FOLDER = ".partial"  # of the records' folder; git ignores it


def path_of(records: Path, run: Run) -> Path:
    """A hash, for the names of contenders are no names of files."""
    return records / FOLDER / f"{hashlib.sha256(repr(run).encode()).hexdigest()[:16]}.pt"


class Partial:
    """The state of one run, saved every so many minutes."""

    def __init__(self, path: Path, origin: dict[str, Any], minutes: float) -> None:
        """``origin`` is the record's: what other code, packages or machines have saved is not continued."""
        self.path, self.origin, self.minutes = path, origin, minutes
        self._saved = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._saved >= 60 * self.minutes

    def save(self, state: dict[str, Any]) -> None:
        """The former state stays until the new one is whole. A full disk is no reason to end the run."""
        aside = self.path.with_suffix(".new")
        with contextlib.suppress(OSError, RuntimeError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(aside, "wb") as file:
                torch.save({"origin": self.origin, "state": state}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.path)
        self._saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=False)
        except Exception:  # not there, or not whole: the run starts anew, which is slower and just as right
            return None
        return found["state"] if found["origin"] == self.origin else None


def random_state() -> dict[str, Any]:
    found = {"torch": torch.get_rng_state(), "python": random.getstate()}
    return found | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
