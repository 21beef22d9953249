"""A run, its final loss by its record, and the versions a record has."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import platform
from dataclasses import dataclass
from typing import Any

# Shares of the steps after which the model is evaluated. The mean of the last three is the final loss.
EVALUATED_AT = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
PACKAGES = ("torch", "mechanic-pytorch", "dadaptation", "prodigyopt", "dog-optimizer", "schedulefree")


@dataclass(frozen=True, order=True)
class Run:
    """What is recorded once."""

    task: str
    contender: str
    lr: float
    seed: int


def run_of(record: dict[str, Any]) -> Run:
    return Run(record["task"], record["contender"], record["lr"], record["seed"])


def final(record: dict[str, Any], key: str = "train_loss") -> float:
    """The mean of the last three evaluations; infinite where the run broke off."""
    values = record["curve"].get(key, [])
    if len(values) < len(EVALUATED_AT) or None in values:
        return math.inf
    return sum(values[-3:]) / 3


@functools.cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "mechanic": importlib.metadata.version("mechanic")}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
