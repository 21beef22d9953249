"""Trains a run, evaluates it on the way, and makes its record."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.suite.contenders import CONTENDERS, Contender
from benchmarks.suite.loop import batches, training
from benchmarks.suite.record import EVALUATED_AT, Run, versions
from benchmarks.suite.task import IGNORED, Task
from benchmarks.suite.tasks import TASKS
from mechanic.torch import Mechanic


@functools.cache
def _evaluation_batches(task: Task) -> dict[str, Any]:
    """The same samples for every run, masked the same way."""
    prepared = {}
    for part, tensors in task.data()._asdict().items():
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(len(tensors[0]), generator=generator)[: task.evaluated]
        prepared[part] = task.prepare(tuple(tensor[chosen] for tensor in tensors), generator)
    return prepared


@torch.no_grad()
def evaluate(task: Task, model: nn.Module) -> dict[str, float]:
    """Loss and accuracy on a fixed part of the train and of the test data, in evaluation mode."""
    was_training = model.training
    model.eval()
    found = {}
    for part, (inputs, targets) in _evaluation_batches(task).items():
        logits = model(*inputs).flatten(0, -2)
        targets = targets.flatten()
        counts = targets != IGNORED
        right = logits.argmax(-1)[counts] == targets[counts]
        found[f"{part}_loss"] = nn.functional.cross_entropy(logits[counts], targets[counts]).item()
        found[f"{part}_accuracy"] = right.float().mean().item()
    model.train(was_training)
    return found


@contextlib.contextmanager
def evaluation_point(task: Task, model: nn.Module, optimizer: Optimizer, average: Any) -> Iterator[nn.Module]:
    """The weights that a contender wants to be judged by."""
    if average is not None:
        yield average.averaged_model
        return
    moves = hasattr(getattr(optimizer, "base", optimizer), "eval")  # Schedule-Free
    if moves:
        optimizer.eval()
        _settle_batch_norms(task, model)
    yield model
    if moves:
        optimizer.train()


@torch.no_grad()
def _settle_batch_norms(task: Task, model: nn.Module) -> None:
    """Schedule-Free's authors advise this before evaluating at other weights than were trained at."""
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        for _, (inputs, _) in zip(range(30), batches(task, seed=0), strict=False):
            model(*inputs)


def execute(run: Run) -> dict[str, Any]:
    """Train as the run says; the record of what happened. That an optimizer raises is a result, too."""
    torch.set_num_threads(1)
    task, contender = TASKS[run.task], CONTENDERS[run.contender]
    task.model(), task.data()  # what is missing here is no fault of the contender
    try:
        found = measure(task, contender, run.lr, run.seed)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:300], "seconds": 0.0, "curve": {}}
    return {**vars(run), **found, "versions": versions()}


def measure(task: Task, contender: Contender, lr: float, seed: int) -> dict[str, Any]:
    due = {round(share * task.steps) for share in EVALUATED_AT}
    curve: dict[str, list[float | None]] = {}
    average, seconds, start = None, 0.0, time.perf_counter()
    build = functools.partial(contender.build, task=task, lr=lr)
    options = {"follows_schedule": contender.follows_schedule, "observes_every": contender.observes_every}
    for step, model, optimizer in training(task, build, seed, **options):
        if contender.averages:
            average = average or _average_of(model)
            average.step()
        if step not in due:
            continue
        seconds += time.perf_counter() - start
        with evaluation_point(task, model, optimizer, average) as judged:
            point = {"step": step, **evaluate(task, judged)}
        if isinstance(optimizer, Mechanic):
            point["scale"] = statistics.median(optimizer.scales().values())
        for key, value in point.items():
            curve.setdefault(key, []).append(float(f"{value:.5g}") if math.isfinite(value) else None)
        if not math.isfinite(point["train_loss"]):
            break  # what has diverged does not come back
        start = time.perf_counter()
    return {"steps": task.steps, "seconds": round(seconds, 3), "curve": curve}


def _average_of(model: nn.Module) -> Any:
    from dog import PolynomialDecayAverager

    return PolynomialDecayAverager(model)
