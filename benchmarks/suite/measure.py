"""Trains a run, evaluates it on the way, and makes its record."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.suite.contenders import BY_ROLE, Contender
from benchmarks.suite.loop import Training, batches
from benchmarks.suite.plan import Pair, find
from benchmarks.suite.record import EVALUATED_AT, Run, environment
from benchmarks.suite.task import IGNORED, Task
from mechanic.torch import Mechanic

# Memory, disks, GPUs, and what is not installed or not there; FileNotFoundError is an OSError.
INFRASTRUCTURE = (MemoryError, torch.OutOfMemoryError, OSError, ImportError)
INFRASTRUCTURE += (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()


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
    """The losses on a fixed part of the train and of the test data, in evaluation mode; a classification's accuracy."""
    was_training = model.training
    model.eval()
    found = {}
    for part, (inputs, targets) in _evaluation_batches(task).items():
        if task.judged_by is not None:
            found[f"{part}_loss"] = task.judged_by(model, (inputs, targets)).item()
            continue
        logits = model(*inputs).flatten(0, -2)
        targets = targets.flatten()
        counts = targets != IGNORED
        right = logits.argmax(-1)[counts] == targets[counts]
        found[f"{part}_loss"] = nn.functional.cross_entropy(logits[counts], targets[counts]).item()
        found[f"{part}_accuracy"] = right.float().mean().item()
        if part == "test":
            found["test_ece"] = calibration_error(logits[counts], targets[counts])
    model.train(was_training)
    return found


def calibration_error(logits: Tensor, targets: Tensor, bins: int = 15) -> float:
    """How far confidence and accuracy are apart, in the mean over samples, binned by confidence in equal widths."""
    confidence, answers = logits.softmax(-1).max(-1)
    # A confidence on a border belongs to the bin below, as in Guo et al. 2017.
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1
    excess = torch.zeros(bins).index_add_(0, index, confidence - (answers == targets).float())
    return (excess.abs().sum() / len(targets)).item()


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
        device = str(next(model.parameters()).device)
        for _, (inputs, _) in zip(range(30), batches(task, seed=0, device=device), strict=False):
            model(*inputs)


@dataclass
class Progress:
    """What a run has found so far."""

    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of this process: what else the machine does is not in it
    curve: dict[str, list[float | None]] = field(default_factory=dict)

    def add(self, point: dict[str, float]) -> None:
        for key, value in point.items():
            self.curve.setdefault(key, []).append(float(f"{value:.5g}") if math.isfinite(value) else None)


@dataclass(frozen=True)
class Settings:
    """How runs are run, but for what they are."""

    commit: str | None = None
    on_gpu: bool = False
    find: Callable[[Run], Pair] = find  # what a run is of


def execute(run: Run, settings: Settings) -> dict[str, Any]:
    """Train as the run says; the record of what happened. That an optimizer raises is a result, too, but no score."""
    torch.set_num_threads(1)
    task, contender = settings.find(run)
    task.model(), task.data()  # what is missing here is no fault of the contender
    device = "cuda" if settings.on_gpu and task.on_gpu and torch.cuda.is_available() else "cpu"
    progress, error = Progress(), {}
    try:
        measure(task, contender, run.lr, run.seed, progress, device=device)
    except Exception as raised:
        if is_infrastructure(raised):
            raise
        error = {"error": f"{type(raised).__name__}: {raised}"[:300], "error_step": progress.step}
    return {**vars(run), **_found(task, progress), **error, **environment(settings.commit, device)}


def is_infrastructure(error: BaseException) -> bool:
    """Whether the machine failed, not the contender: such a run says nothing, and is to be run again."""
    return isinstance(error, INFRASTRUCTURE) or "can't allocate memory" in str(error)  # torch's words on a CPU


def measure(
    task: Task,
    contender: Contender,
    lr: float,
    seed: int,
    progress: Progress | None = None,
    *,
    device: str = "cpu",
) -> dict[str, Any]:
    """What a record has of a run; ``progress`` has what was found if this raises."""
    progress = progress or Progress()
    torch.set_grad_enabled(True)  # mechanic-pytorch leaves it off when it raises, and a worker has many runs
    due = evaluation_steps(task)
    start = time.perf_counter()
    training = Training(
        task if contender.schedule is None else replace(task, schedule=contender.schedule),
        functools.partial(contender.build, task=task, lr=lr),
        seed,
        follows_schedule=contender.follows_schedule,
        observes_every=contender.observes_every,
        device=device,
    )
    average = _average_of(training.model) if contender.averages else None
    cpu_start = time.process_time()  # without what is imported and built once
    for step, model, optimizer in training:
        progress.step = step
        if average is not None:
            average.step()
        if step not in due:
            continue
        _wait_for(device)
        progress.seconds += time.perf_counter() - start
        progress.cpu_seconds += time.process_time() - cpu_start
        with evaluation_point(task, model, optimizer, average) as judged:
            point = evaluate(task, judged if device == "cpu" else _FromCPU(judged))
        if isinstance(optimizer, Mechanic):
            scales = optimizer.scales()
            point["scale"] = statistics.median(scales.values())
            if contender.name == BY_ROLE:
                point |= {f"scale of {role}": scale for role, scale in scales.items()}
        progress.add(point)
        if not math.isfinite(point["train_loss"]):
            break  # what has diverged does not come back
        start, cpu_start = time.perf_counter(), time.process_time()
    return _found(task, progress)


def _wait_for(device: str) -> None:
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.synchronize()


class _FromCPU(nn.Module):
    """A model on another device, that takes and gives what is on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        device = next(self.model.parameters()).device
        return self.model(*(part.to(device) for part in inputs)).cpu()


def evaluation_steps(task: Task) -> list[int]:
    return sorted({round(share * task.steps) for share in task.evaluated_at or EVALUATED_AT})


def _found(task: Task, progress: Progress) -> dict[str, Any]:
    spent = {key: round(getattr(progress, key), 3) for key in ("seconds", "cpu_seconds")}
    curve = {key: values for key, values in progress.curve.items() if key.startswith(task.curves)}
    curve |= {key: v if len(v) <= 4 else [v[0], *v[-3:]] for key, v in progress.curve.items() if key in task.ends}
    return {"evaluated": evaluation_steps(task), **spent, "curve": curve}


def _average_of(model: nn.Module) -> Any:
    from dog import PolynomialDecayAverager

    return PolynomialDecayAverager(model)
