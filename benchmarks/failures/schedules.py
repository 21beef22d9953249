"""Learning rates that change: schedulers, zero, negative, and rates held in tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from benchmarks.failures.contenders import Contender
from benchmarks.failures.task import KEEPS_UP, STEPS, Training, keeps_up_with_undisturbed, largest_difference
from benchmarks.failures.verdicts import Outcome, right_if, theme

situation = theme("Learning rates")


def _under(contender: Contender, make: Callable[[Optimizer], Any], steps: int = STEPS) -> Training:
    """Train under a scheduler, which is stepped after every step."""
    training = Training(contender)
    scheduler = make(training.optimizer)
    return training.run(steps, after_step=lambda step: scheduler.step())


def _under_schedule(contender: Contender, make: Callable[[Optimizer], Any]) -> Outcome:
    return keeps_up_with_undisturbed(_under(contender, make), contender)


@situation(
    "lr = 0",
    "After 100 steps the learning rate is 0 for 10 steps.",
    "No parameter moves in those steps, not even in its last bit.",
    r"learning rate|\blr\b",
)
def zero(contender: Contender) -> Outcome:
    training = Training(contender).run(100)
    before = training.values()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    after = training.run(10, first=100).values()
    moved = largest_difference(after, before)
    return right_if(moved == 0.0, f"moved by up to {moved:.2g}")


@situation(
    "negative lr",
    "A linear decay over 400 steps is not stopped at its end: 40 more steps, down to a tenth of the peak below zero.",
    KEEPS_UP,
    r"learning rate|\blr\b|negative",
)
def negative(contender: Contender) -> Outcome:
    training = _under(contender, lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / STEPS), STEPS + 40)
    return keeps_up_with_undisturbed(training, contender)


@situation("lr in a tensor", "The learning rate is a 0-dimensional tensor.", KEEPS_UP, r"tensor")
def in_a_tensor(contender: Contender) -> Outcome:
    training = Training(contender, lr=torch.tensor(contender.lr)).run()
    return keeps_up_with_undisturbed(training, contender)


@situation("warm-up from 0", "A linear warm-up over 40 steps, which starts at a learning rate of 0.", KEEPS_UP)
def warm_up(contender: Contender) -> Outcome:
    return _under_schedule(contender, lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 40)))


@situation("CosineAnnealingLR", "A cosine to 0 over all steps.", KEEPS_UP)
def cosine(contender: Contender) -> Outcome:
    return _under_schedule(contender, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS))


@situation("CosineAnnealingWarmRestarts", "A cosine that starts again every 100 steps.", KEEPS_UP)
def restarts(contender: Contender) -> Outcome:
    return _under_schedule(contender, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=100))


@situation("OneCycleLR", "One cycle over all steps, which moves the betas as well.", KEEPS_UP)
def one_cycle(contender: Contender) -> Outcome:
    return _under_schedule(contender, lambda o: lr_scheduler.OneCycleLR(o, max_lr=contender.lr, total_steps=STEPS + 1))


@situation("ReduceLROnPlateau", "The learning rate halves when the loss has not fallen for 20 steps.", KEEPS_UP)
def reduced(contender: Contender) -> Outcome:
    training = Training(contender)
    scheduler = lr_scheduler.ReduceLROnPlateau(training.optimizer, factor=0.5, patience=20)
    training.run(after_step=lambda step: scheduler.step(training.loss()))
    return keeps_up_with_undisturbed(training, contender)


@situation(
    "schedulers in a row",
    "SequentialLR: a linear warm-up over 20 steps, then an exponential decay to a tenth.",
    KEEPS_UP,
)
def in_a_row(contender: Contender) -> Outcome:
    def make(optimizer: Optimizer) -> Any:
        warm = lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
        decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.1 ** (1 / STEPS))
        return lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[20])

    return _under_schedule(contender, make)


@situation(
    "lr set from outside by a factor",
    "The training script multiplies every group's lr by 0.1 after 200 steps.",
    KEEPS_UP,
)
def set_from_outside(contender: Contender) -> Outcome:
    training = Training(contender).run(200)
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.1
    return keeps_up_with_undisturbed(training.run(200, first=200), contender)


@situation(
    "groups with different lr",
    "The second layer has a tenth of the learning rate of the first.",
    KEEPS_UP,
    r"learning rate|\blr\b",
)
def different_rates(contender: Contender) -> Outcome:
    def groups(model: Any) -> list[dict[str, Any]]:
        return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1 * contender.lr}]

    training = Training(contender, groups=groups).run()
    return keeps_up_with_undisturbed(training, contender)
