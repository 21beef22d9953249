"""A task: data, model, steps and schedule of one training run, and how a batch becomes inputs and targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.data import datasets
from benchmarks.data.datasets import Split

IGNORED = -100  # a target that does not count, as cross_entropy has it
Prepared = tuple[tuple[Tensor, ...], Tensor]  # what the model sees, and what it should answer
Loss = Callable[[nn.Module, Prepared], Tensor]


def as_it_is(batch: tuple[Tensor, ...], generator: torch.Generator) -> Prepared:
    return batch[:-1], batch[-1]


def next_token(batch: tuple[Tensor, ...], generator: torch.Generator) -> Prepared:
    (tokens,) = batch
    return (tokens[:, :-1],), tokens[:, 1:]


def masked(batch: tuple[Tensor, ...], generator: torch.Generator) -> Prepared:
    """15 % of the tokens are asked for: 80 % of those hidden, 10 % replaced, 10 % left."""
    (tokens,) = batch
    chance = torch.rand(tokens.shape, generator=generator)
    random = torch.randint(len(datasets.SPECIAL), datasets.VOCABULARY, tokens.shape, generator=generator)
    inputs = torch.where(chance < 0.12, datasets.MASK_ID, torch.where(chance < 0.135, random, tokens))
    return (inputs,), torch.where(chance < 0.15, tokens, IGNORED)


def translation(batch: tuple[Tensor, ...], generator: torch.Generator) -> Prepared:
    source, target = batch
    answer = target[:, 1:]
    return (source, target[:, :-1]), torch.where(answer == datasets.PAD_ID, IGNORED, answer)


def cross_entropy(model: nn.Module, prepared: Prepared) -> Tensor:
    inputs, targets = prepared
    return nn.functional.cross_entropy(model(*inputs).flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


@dataclass(frozen=True)
class Task:
    """One training run but for the optimizer; see :class:`benchmarks.suite.loop.Training` for the loop."""

    name: str
    data: Callable[[], Split]
    model: Callable[[], nn.Module]
    steps: int
    batch: int
    schedule: Callable[[float], float]
    prepare: Callable[[tuple[Tensor, ...], torch.Generator], Prepared] = as_it_is
    loss: Loss = cross_entropy  # what is trained
    judged_by: Loss | None = None  # what is evaluated; None: cross-entropy and accuracy, as of a classification
    weight_decay: float = 0.01  # decoupled; AdamW, NAdamW and Lion
    l2: float = 1e-4  # SGD's own weight decay
    on_gpu: bool = True  # False: on the CPU even where there is a GPU, as the environments of policies are
    evaluated: int = 1000  # samples of the train and of the test data that the evaluations see
    evaluated_at: tuple[float, ...] | None = None  # shares of the steps; None: as ``record.EVALUATED_AT``
    curves: tuple[str, ...] = ("train_loss", "scale")  # recorded of every evaluation; with what begins so
    ends: tuple[str, ...] = ("test_loss", "test_accuracy", "test_ece")  # recorded of the first and of the last three
    seconds: float = 10.0  # about, one run on one core
