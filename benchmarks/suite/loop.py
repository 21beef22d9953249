"""The one training loop that all contenders go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.suite.partial import random_state, set_random_state
from benchmarks.suite.schedules import at_steps
from benchmarks.suite.shuffled import Shuffled
from benchmarks.suite.task import Prepared, Task


class Batches:
    """Without end: the train data, or some rows of it, in an order of the seed's, shuffled anew for every epoch."""

    def __init__(self, task: Task, seed: int, rows: Tensor | None = None, device: str = "cpu") -> None:
        self.task, self.device = task, device
        self._train = task.data().train
        rows = torch.arange(len(self._train[0])) if rows is None else rows
        self._chosen = Shuffled(rows, min(task.batch, len(rows)), torch.Generator().manual_seed(seed))

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Prepared:
        chosen = next(self._chosen)
        inputs, targets = self.task.prepare(tuple(part[chosen] for part in self._train), self._chosen.generator)
        return tuple(part.to(self.device) for part in inputs), targets.to(self.device)

    def state_dict(self) -> dict[str, Any]:
        return self._chosen.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._chosen.load_state_dict(state)


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
        self.task, self.observes_every, self.step = task, observes_every, 0
        self.model = task.model().train().to(device)
        self.optimizer: Any = optimizer_of(self.model)
        shape = task.schedule if follows_schedule else lambda done: 1.0
        self.schedule = LambdaLR(self.optimizer, at_steps(shape, task.steps))
        rows = None
        self.held_out: Batches | None = None
        if observes_every:
            order = torch.randperm(len(task.data().train[0]), generator=torch.Generator().manual_seed(0))
            rows, kept = order.split([len(order) - len(order) // 10, len(order) // 10])
            self.held_out = Batches(task, seed, kept, device)
        self.batches = Batches(task, seed, rows, device)

    def __iter__(self) -> Iterator[tuple[int, nn.Module, Any]]:
        if self.step == 0:
            yield 0, self.model, self.optimizer
        while self.step < self.task.steps:
            self._take_step()
            yield self.step, self.model, self.optimizer

    def _take_step(self) -> None:
        self.optimizer.zero_grad()
        if self.held_out is not None and (self.step + 1) % self.observes_every == 0:
            self.task.loss(self.model, next(self.held_out)).backward()
            self.optimizer.observe()
        loss = self.task.loss(self.model, next(self.batches))
        loss.backward()
        self.optimizer.step(*([lambda: loss.detach()] if getattr(self.optimizer, "takes_loss", False) else []))
        self.schedule.step()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps hang on."""
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        parts["optimizer"] = renamed(parts["optimizer"], names_of_parameters(self.model))
        return {**parts, "step": self.step, "random": random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = {name: parameter for parameter, name in names_of_parameters(self.model).items()}
        state = {**state, "optimizer": renamed(state["optimizer"], names)}
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.step = state["step"]
        set_random_state(state["random"])

    def _parts(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("model", "optimizer", "schedule", "batches")}
        return found | ({"held_out": self.held_out} if self.held_out is not None else {})


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: f"parameter {name}" for name, parameter in model.named_parameters()}


def renamed(value: Any, names: dict[Any, Any]) -> Any:
    """With other keys, at any depth: mechanic-pytorch's state has parameters for keys, which a file cannot keep."""
    if not isinstance(value, dict):
        return value
    return {names.get(key, key): renamed(inner, names) for key, inner in value.items()}


def train_plainly(task: Task, optimizer_class: Callable[..., Optimizer], seed: int) -> nn.Module:
    *_, (_, model, _) = Training(task, lambda model: optimizer_class(model.parameters()), seed)
    return model
