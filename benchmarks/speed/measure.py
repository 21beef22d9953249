"""The measurements: time of a step, time of training, memory, and the machine's bandwidth."""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import records
from benchmarks.speed.contenders import CELLS, CONTENDERS, TRAINED
from benchmarks.suite.models import GPT


def _with_gradients(tensors: int, elements: int) -> list[Tensor]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(0.02 * torch.randn(elements)) for _ in range(tensors)]
    for p in params:
        p.grad = 0.01 * torch.randn(elements)
    return params


def _timed(run: Callable[[], Any]) -> float:
    """CPU seconds of one thread, which other work disturbs least; of several the time that passes."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    run()
    return clock() - began


def steps(cell: str, rounds: int) -> None:
    tensors, elements, names = CELLS[cell]
    if cell.endswith("two threads"):
        torch.set_num_threads(2)
    for name in names:
        contender = CONTENDERS[name]
        pair = [c.build(_with_gradients(tensors, elements)) for c in (CONTENDERS[contender.against], contender)]
        times: list[list[float]] = [[], []]
        for number in range(rounds + 2):  # the first two fill state and compile
            for optimizer, spent in zip(pair, times, strict=True):
                seconds = _timed(optimizer.step)
                if number >= 2:
                    spent.append(1e3 * seconds)
        del pair, optimizer
        bare, ours = (statistics.median(spent) for spent in times)
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        records.add(
            part="step", cell=cell, contender=name, against=contender.against, ms=ours, bare_ms=bare, ratio=ratio
        )


def training(rounds: int) -> None:
    """Every contender trains a model of its own, by turns; ratios are of steps of the same turn."""
    tokens = torch.randint(65, (8, 129), generator=torch.Generator().manual_seed(0))
    loops: dict[str, Callable[[], None]] = {}
    for name in TRAINED:
        torch.manual_seed(0)
        model = GPT(vocabulary=65, length=128, width=320, layers=8, heads=8, dropout=0.0)
        loops[name] = functools.partial(_train_once, model, CONTENDERS[name].build(model.parameters()), tokens)
    cell = f"GPT of {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M, 8 x 128"
    times: dict[str, list[float]] = {name: [] for name in TRAINED}
    for number in range(3 * rounds + 2):  # they differ by little, so more of them
        for name, loop in loops.items():
            seconds = _timed(loop)
            if number >= 2:
                times[name].append(1e3 * seconds)
    bare = times["AdamW fused"]
    for name in TRAINED[1:]:
        ratio = statistics.median(own / base for own, base in zip(times[name], bare, strict=True))
        ms, bare_ms = statistics.median(times[name]), statistics.median(bare)
        records.add(
            part="training", cell=cell, contender=name, against="AdamW fused", ms=ms, bare_ms=bare_ms, ratio=ratio
        )


def _train_once(model: torch.nn.Module, optimizer: Any, tokens: Tensor) -> None:
    optimizer.zero_grad()
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()


def memory(name: str) -> None:
    """Bytes per parameter beyond parameters and gradients: kept between steps, and passing during one."""

    def resident(key: str) -> int:
        ctypes.CDLL(None).malloc_trim(0)  # what has been freed is nobody's
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    def touch(optimizer: Any) -> None:
        for _ in range(3):
            optimizer.step()

    touch(CONTENDERS[name].build(_with_gradients(2, 300_000)))  # what is loaded or compiled at the first step
    params = _with_gradients(20, 1_000_000)
    before = resident("VmRSS")
    optimizer = CONTENDERS[name].build(params)
    touch(optimizer)
    kept = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    optimizer.step()
    elements = sum(p.numel() for p in params)
    records.add(
        part="memory",
        cell="20M",
        contender=name,
        kept=(kept - before) / elements,
        passing=(resident("VmHWM") - kept) / elements,
    )


def bandwidth() -> None:
    a, b = (torch.ones(50_000_000) for _ in range(2))
    runs = {"x += d": (3, lambda: a.add_(b)), "<x, x>": (1, lambda: torch.dot(a, a)), "clone": (2, lambda: a.clone())}
    for name, (words, run) in runs.items():
        seconds = statistics.median(_timed(run) for _ in range(9))
        records.add(part="bandwidth", cell="50M", contender=name, gigabytes_per_second=words * a.nbytes / seconds / 1e9)
