"""The one training loop that all contenders go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.suite.schedules import at_steps
from benchmarks.suite.task import Prepared, Task


def batches(task: Task, seed: int, rows: Tensor | None = None, device: str = "cpu") -> Iterator[Prepared]:
    """Without end: the train data, or some rows of it, in an order of the seed's, shuffled anew for every epoch.

    The rest of an epoch is left out.
    """
    train, generator = task.data().train, torch.Generator().manual_seed(seed)
    rows = torch.arange(len(train[0])) if rows is None else rows
    size = min(task.batch, len(rows))
    while True:
        order = rows[torch.randperm(len(rows), generator=generator)]
        for chosen in order[: len(order) // size * size].split(size):
            inputs, targets = task.prepare(tuple(part[chosen] for part in train), generator)
            yield tuple(part.to(device) for part in inputs), targets.to(device)


class Training:
    """Iterated over, it yields the model and its optimizer before the first and after every step.

    With ``observes_every``, a tenth of the train data is held out, and its gradients are observed so often.
    """

    def __init__(
        self,
        task: Task,
        optimizer_of: Callable[[nn.Module], Optimizer],
        seed: int,
        *,
        follows_schedule: bool = True,
        observes_every: int = 0,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(seed)
        self.task, self.observes_every = task, observes_every
        self.model = task.model().train().to(device)
        self.optimizer: Any = optimizer_of(self.model)
        shape = task.schedule if follows_schedule else lambda done: 1.0
        self.schedule = LambdaLR(self.optimizer, at_steps(shape, task.steps))
        rows = None
        if observes_every:
            order = torch.randperm(len(task.data().train[0]), generator=torch.Generator().manual_seed(0))
            rows, kept = order.split([len(order) - len(order) // 10, len(order) // 10])
            self.held_out = batches(task, seed, kept, device)
        self.batches = batches(task, seed, rows, device)

    def __iter__(self) -> Iterator[tuple[int, nn.Module, Any]]:
        yield 0, self.model, self.optimizer
        for step in range(1, self.task.steps + 1):
            self._take_step(step)
            yield step, self.model, self.optimizer

    def _take_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        if self.observes_every and step % self.observes_every == 0:
            self.task.loss(self.model, next(self.held_out)).backward()
            self.optimizer.observe()
        loss = self.task.loss(self.model, next(self.batches))
        loss.backward()
        self.optimizer.step(*([lambda: loss.detach()] if getattr(self.optimizer, "takes_loss", False) else []))
        self.schedule.step()


def train_plainly(task: Task, optimizer_class: Callable[..., Optimizer], seed: int) -> nn.Module:
    *_, (_, model, _) = Training(task, lambda model: optimizer_class(model.parameters()), seed)
    return model
