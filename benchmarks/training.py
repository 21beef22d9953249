"""The one loop that all contenders go through, and the record of a run."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.tasks import IGNORED, TASKS, Task
from mechanic.torch import Mechanic

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


def batches(task: Task, seed: int, rows: Tensor | None = None) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Without end: the train data, or some rows of it, in an order of the seed's, shuffled anew for every epoch."""
    generator = torch.Generator().manual_seed(seed)
    train = task.data().train
    rows = torch.arange(len(train[0])) if rows is None else rows
    size = min(task.batch, len(rows))
    while True:
        order = rows[torch.randperm(len(rows), generator=generator)]
        for chosen in order[: len(order) // size * size].split(size):
            yield task.prepare(tuple(part[chosen] for part in train), generator)


def training(
    task: Task,
    optimizer_of: Callable[[nn.Module], Optimizer],
    seed: int,
    *,
    follows_schedule: bool = True,
    observes_every: int = 0,
) -> Iterator[tuple[int, nn.Module, Optimizer]]:
    """Yield the model and its optimizer before the first and after every step.

    With ``observes_every``, a tenth of the train data is held out, and its gradients are observed so often.
    """
    torch.manual_seed(seed)
    model = task.model().train()
    optimizer = optimizer_of(model)
    shape = task.schedule if follows_schedule else lambda done: 1.0
    # The first step of a warm-up is not taken at 0.
    schedule = LambdaLR(optimizer, lambda step: shape((step + (shape(0.0) == 0.0)) / task.steps))
    rows = held_out = None
    if observes_every:
        order = torch.randperm(len(task.data().train[0]), generator=torch.Generator().manual_seed(0))
        rows, kept = order.split([len(order) - len(order) // 10, len(order) // 10])
        held_out = batches(task, seed, kept)
    yield 0, model, optimizer
    for step, prepared in zip(range(1, task.steps + 1), batches(task, seed, rows), strict=False):
        optimizer.zero_grad()
        if held_out is not None and step % observes_every == 0:
            task.loss(model, next(held_out)).backward()
            optimizer.observe()
        task.loss(model, prepared).backward()
        optimizer.step()
        schedule.step()
        yield step, model, optimizer


def train_plainly(task: Task, optimizer_class: Callable[..., Optimizer], seed: int) -> nn.Module:
    *_, (_, model, _) = training(task, lambda model: optimizer_class(model.parameters()), seed)
    return model


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


@functools.cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "mechanic": importlib.metadata.version("mechanic")}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
