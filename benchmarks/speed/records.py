"""The records of speed and memory on disk, one line per measurement."""

from __future__ import annotations

import json
import platform
from typing import Any

import torch

from benchmarks.suite import recordbook

RECORDS = recordbook.RECORDS / "speed" / "speed.jsonl"
Records = dict[tuple[str, str, str], dict[str, Any]]  # by part, cell and contender


def add(**figures: Any) -> None:
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cpu": platform.machine()}
    line = json.dumps({**rounded, **about}, separators=(",", ":"))
    print(line, flush=True)
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    with open(RECORDS, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def read() -> Records:
    """The last line of a cell and contender counts."""
    records = {}
    for line in RECORDS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        records[record["part"], record["cell"], record["contender"]] = record
    return records
