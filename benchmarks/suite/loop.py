"""The one training loop that all contenders go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.suite.task import Prepared, Task


def batches(task: Task, seed: int, rows: Tensor | None = None) -> Iterator[Prepared]:
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
