"""A run, its final loss by its record, and what a record says of where it was made."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mechanic

# Shares of the steps after which the model is evaluated. The mean of the last three is the final loss.
EVALUATED_AT = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
# All that a run's numbers hang on: frameworks, contenders, models and tokenizers.
PACKAGES = (
    *("torch", "mechanic-pytorch", "dadaptation", "prodigyopt", "dog-optimizer", "schedulefree"),
    *("pytorch_optimizer", "prodigy-plus-schedule-free", "transformers", "tokenizers"),
)
# Raised when a change of mechanic.tuner changes the numbers of ours. 2: the stake grows. 3: S does not rise by a large
# step against Delta, and the stake grows for longer. 4: S does not grow when the train data are memorized.
# S was calmed from step 1,000 on later: runs of up to 1,000 steps did not change, and all longer ones were made anew.
# 5: the same method, but the base steps on copies, which rounds otherwise.
TUNER = 5
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, order=True)
class Run:
    """What is recorded once."""

    task: str
    contender: str
    lr: float
    seed: int


def run_of(record: dict[str, Any]) -> Run:
    return Run(record["task"], record["contender"], record["lr"], record["seed"])


def raised(record: dict[str, Any]) -> bool:
    """Whether the contender raised an exception; such a record has no final loss, and is no divergence."""
    return "error" in record


def final(record: dict[str, Any], key: str = "train_loss") -> float:
    """The mean of the last three evaluations; infinite where the run diverged."""
    if raised(record):
        raise ValueError(f"{run_of(record)} raised, and has no final loss: {record['error']}")
    values = record["curve"].get(key, [])
    if not values or evaluations(record) < len(record["evaluated"]) or None in values:
        return math.inf
    return sum(values[-3:]) / 3


def evaluations(record: dict[str, Any]) -> int:
    """How many there are: less than the task has where the run diverged or raised."""
    return max(map(len, record["curve"].values()), default=0)


def environment(commit: str | None, device: str = "cpu") -> dict[str, Any]:
    """What made a record: code, packages and machine; no names of hosts or folders."""
    return {"commit": commit, "tuner": TUNER, "machine": machine(device), "versions": versions()}


@functools.cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "mechanic": mechanic.__version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def commit() -> str | None:
    """Of the code here; with a "+" if it has been changed since, and None where there is no git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout

    try:
        name = git("rev-parse", "--short", "HEAD").strip()
        changed = git("status", "--porcelain", "--", "src/mechanic", "benchmarks", "algoperf", ":!benchmarks/records")
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+" if changed else "")


@functools.cache
def machine(device: str = "cpu") -> dict[str, Any]:
    found = {"cpu": _cpu(), "cores": os.cpu_count()}
    if device != "cpu":
        import torch

        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
