"""Training on several processes, compared with one."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.failures import processes
from benchmarks.failures.contenders import CONTENDERS, Contender
from benchmarks.failures.verdicts import Outcome, right_if, theme

situation = theme("Several processes")
SHARDS = r"DTensor|shard|FSDP|checkpoint"
CLOSE = "Parameters are within 1% (of the way they went) of those of"


@functools.cache
def _alone(key: str, even: bool) -> list[Tensor]:
    model = processes.Sized(even)
    processes.train_sized(CONTENDERS[key], model)
    return processes.whole(model)


def _close(found: list[Tensor], expected: list[Tensor], even: bool) -> Outcome:
    start = processes.whole(processes.Sized(even))
    a, b, c = (torch.cat([t.flatten() for t in tensors]) for tensors in (found, expected, start))
    distance = ((a - b).norm() / (b - c).norm()).item()
    return right_if(distance <= 1e-2, f"off by {distance:.2g} of the way")


def _on_two_ranks(contender: Contender, job: str) -> list[Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        processes.start(job, contender.key, Path(folder), ranks=2)
        result: list[Tensor] = torch.load(Path(folder) / "result.pt")
    return result


def _as_alone(contender: Contender, job: str, even: bool) -> Outcome:
    """Whether a job on two ranks ends where one process does."""
    return _close(_on_two_ranks(contender, job), _alone(contender.key, even), even)


@situation("DDP", "Two ranks with half of the batch each.", f"{CLOSE} one process.", seconds=240.0)
def ddp(contender: Contender) -> Outcome:
    return _as_alone(contender, "ddp", even=False)


@situation(
    "FSDP2",
    "fully_shard on two ranks, with sizes that divide by two.",
    f"{CLOSE} one process.",
    SHARDS,
    seconds=240.0,
)
def fsdp2_even(contender: Contender) -> Outcome:
    return _as_alone(contender, "fsdp2_even", even=True)


@situation(
    "FSDP2, uneven shards",
    "fully_shard on two ranks, with sizes that do not divide by two and a parameter of one element.",
    f"{CLOSE} one process.",
    SHARDS,
    seconds=240.0,
)
def fsdp2_uneven(contender: Contender) -> Outcome:
    return _as_alone(contender, "fsdp2_uneven", even=False)


@situation(
    "resume on another number of ranks",
    "Saved under FSDP2 on two ranks with torch.distributed.checkpoint, resumed on one.",
    f"{CLOSE} the uninterrupted run on two ranks.",
    SHARDS,
    seconds=360.0,
)
def resharded(contender: Contender) -> Outcome:
    expected = _on_two_ranks(contender, "fsdp2_even")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes.start("fsdp2_save", contender.key, folder, ranks=2)
        processes.start("fsdp2_resume", contender.key, folder, ranks=1)
        return _close(torch.load(folder / "result.pt"), expected, even=True)
