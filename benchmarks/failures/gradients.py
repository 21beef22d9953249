"""Gradients that are not finite, too large, too small, missing, sparse, or laid out in an unusual way."""

from __future__ import annotations

import re
import warnings

import torch
from torch import nn

from benchmarks.failures.contenders import Contender
from benchmarks.failures.task import (
    HALVED,
    KEEPS_UP,
    SAME_BITS,
    STEPS,
    Hook,
    Training,
    batch,
    halved,
    is_finite,
    keeps_up_with_model,
    keeps_up_with_undisturbed,
    largest_difference,
    network,
    same_bits_as_undisturbed,
)
from benchmarks.failures.verdicts import WARNED, WRONG, Outcome, right_if, theme

situation = theme("Gradients")
NOT_FINITE = r"finite|\bnan\b|\binf\b"
LATER = 100  # a step at which every contender has learned something


def _filled(training: Training, value: float, steps: range) -> Hook:
    def fill(step: int) -> None:
        if step in steps:
            for p in training.params():
                p.grad.fill_(value)

    return fill


def _after_filling(contender: Contender, value: float, steps: range) -> Outcome:
    training = Training(contender)
    training.run(STEPS, before_step=_filled(training, value, steps))
    return keeps_up_with_undisturbed(training, contender)


@situation(
    "nothing goes wrong",
    "The plain run of 400 steps that others are compared with.",
    HALVED,
)
def plain(contender: Contender) -> Outcome:
    training = Training(contender)
    start, end = training.loss(), training.run().loss()
    return halved(start, end, training.values())


@situation("inf gradient, once", "All gradients of one step are inf.", KEEPS_UP, NOT_FINITE)
def inf_once(contender: Contender) -> Outcome:
    return _after_filling(contender, float("inf"), range(LATER, LATER + 1))


@situation("NaN gradient, once", "All gradients of one step are NaN.", KEEPS_UP, NOT_FINITE)
def nan_once(contender: Contender) -> Outcome:
    return _after_filling(contender, float("nan"), range(LATER, LATER + 1))


@situation("NaN gradients for 20 steps", "The first 20 steps have NaN gradients, the others good ones.", KEEPS_UP)
def nan_at_first(contender: Contender) -> Outcome:
    return _after_filling(contender, float("nan"), range(20))


@situation("NaN in one parameter's gradient", "In one step one element of one gradient is NaN.", KEEPS_UP, NOT_FINITE)
def nan_in_one(contender: Contender) -> Outcome:
    training = Training(contender)

    def spoil(step: int) -> None:
        if step == LATER:
            training.params()[0].grad[3, 2] = float("nan")

    training.run(before_step=spoil)
    return keeps_up_with_undisturbed(training, contender)


@situation(
    "float16 loss scaled, never unscaled",
    "float16 parameters, a loss scale of 2²⁴ and a plain step(): every step has gradients that are inf.",
    "Parameters stay finite, and a warning or an error names the inf gradients.",
    NOT_FINITE,
)
def never_unscaled(contender: Contender) -> Outcome:
    training = Training(contender, network(torch.float16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.run(scale=2.0**24)
    told = [str(warning.message) for warning in caught if re.search("finite|NaN or inf", str(warning.message))]
    if not is_finite(training.values()):
        return right_if(False, "parameters are not finite")
    return right_if(bool(told), f"warns: {told[0]}" if told else "nothing is learned, and nothing tells so")


@situation("loss × 65536", "A loss scale that is never divided out, in float32.", KEEPS_UP)
def scaled(contender: Contender) -> Outcome:
    return keeps_up_with_undisturbed(Training(contender).run(scale=65536.0), contender)


@situation("loss × 1e6", "The loss is in other units.", KEEPS_UP)
def large(contender: Contender) -> Outcome:
    return keeps_up_with_undisturbed(Training(contender).run(scale=1e6), contender)


@situation("loss × 1e12", "The loss is in other units.", KEEPS_UP)
def huge(contender: Contender) -> Outcome:
    return keeps_up_with_undisturbed(Training(contender).run(scale=1e12), contender)


@situation("loss × 1e-6", "The loss is in other units.", KEEPS_UP)
def small(contender: Contender) -> Outcome:
    return keeps_up_with_undisturbed(Training(contender).run(scale=1e-6), contender)


def _after_a_spike(contender: Contender, clip: bool) -> Outcome:
    training = Training(contender)

    def enlarge(step: int) -> None:
        if step == LATER:
            for p in training.params():
                p.grad.mul_(1e6)
        if clip:
            nn.utils.clip_grad_norm_(training.params(), 1.0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.run(before_step=enlarge)
    outcome = keeps_up_with_undisturbed(training, contender)
    told = [str(warning.message) for warning in caught if "gradient" in str(warning.message)]
    return Outcome(WARNED, f"{outcome.detail}; warns: {told[0]}") if told and outcome.verdict == WRONG else outcome


@situation("one gradient × 1e6", "One bad batch, whose gradient is a million times as large.", KEEPS_UP)
def spike(contender: Contender) -> Outcome:
    return _after_a_spike(contender, clip=False)


@situation("one gradient × 1e6, clipped", "The same with clip_grad_norm_ to a norm of 1.", KEEPS_UP)
def clipped_spike(contender: Contender) -> Outcome:
    return _after_a_spike(contender, clip=True)


@situation("zero gradients", "The gradients of steps 0 to 9 and 100 to 109 are zero.", KEEPS_UP)
def zeros(contender: Contender) -> Outcome:
    training = Training(contender)
    at_first, later = (_filled(training, 0.0, steps) for steps in (range(10), range(LATER, LATER + 10)))

    def fill(step: int) -> None:
        at_first(step)
        later(step)

    training.run(before_step=fill)
    return keeps_up_with_undisturbed(training, contender)


@situation("gradient missing now and then", "Every third step one layer has no gradient (None).", KEEPS_UP)
def missing(contender: Contender) -> Outcome:
    training = Training(contender)

    def drop(step: int) -> None:
        if step % 3 == 1:
            for p in training.params()[:2]:
                p.grad = None

    training.run(before_step=drop)
    return keeps_up_with_undisturbed(training, contender)


@situation(
    "parameter that never has a gradient",
    "The optimizer holds a layer that the model does not use.",
    "The unused layer stays as it was. " + KEEPS_UP,
)
def never_a_gradient(contender: Contender) -> Outcome:
    unused = nn.Linear(5, 5)
    before = [p.detach().clone() for p in unused.parameters()]
    training = Training(contender, groups=lambda model: [*model.parameters(), *unused.parameters()])
    training.run()
    if not all(torch.equal(p, old) for p, old in zip(unused.parameters(), before, strict=True)):
        return right_if(False, "the unused layer moved")
    return keeps_up_with_undisturbed(training, contender)


class _Lookup(nn.Module):
    """One embedding per quarter of the plane, with a linear layer on top."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4, 8, sparse=sparse)
        self.linear = nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        quarters = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
        return self.linear(self.table(quarters) + inputs)


@situation(
    "sparse gradient",
    "An embedding with sparse=True.",
    "Keeps up with the run with sparse=False.",
    r"sparse|dense",
)
def sparse(contender: Contender) -> Outcome:
    return keeps_up_with_model(contender, _Lookup(sparse=True), reference=_Lookup(sparse=False))


@situation(
    "gradient of stride 0",
    "p.grad is assigned an expanded tensor, as torch.autograd.grad returns for a sum.",
    "Parameters are within 1e-6 of the run with the same gradients made contiguous.",
)
def expanded(contender: Contender) -> Outcome:
    def train(contiguous: bool) -> list[torch.Tensor]:
        training = Training(contender)
        for _ in range(100):
            gradients = torch.autograd.grad(sum(p.sum().square() for p in training.params()), training.params())
            for p, gradient in zip(training.params(), gradients, strict=True):
                p.grad = gradient.contiguous() if contiguous else gradient[(0,) * p.dim()].expand_as(p)
            training.optimizer.step()
        return training.values()

    distance = largest_difference(train(True), train(False))
    return right_if(distance <= 1e-6, f"off by {distance:.2g}")


@situation("NaN gradient of stride 0", "One step's gradients are one NaN, expanded.", KEEPS_UP, NOT_FINITE)
def expanded_nan(contender: Contender) -> Outcome:
    training = Training(contender)

    def spoil(step: int) -> None:
        if step == LATER:
            for p in training.params():
                p.grad = torch.tensor(float("nan")).expand_as(p)

    training.run(before_step=spoil)
    return keeps_up_with_undisturbed(training, contender)


@situation("clip_grad_norm_", "Gradients are clipped to a norm of 0.1 before every step.", KEEPS_UP)
def clipped(contender: Contender) -> Outcome:
    training = Training(contender)
    training.run(before_step=lambda step: nn.utils.clip_grad_norm_(training.params(), 0.1))
    return keeps_up_with_undisturbed(training, contender)


@situation(
    "gradient accumulation",
    "Every batch comes in four parts, whose gradients are summed.",
    KEEPS_UP,
)
def accumulated(contender: Contender) -> Outcome:
    training = Training(contender)
    for step in range(STEPS):
        training.optimizer.zero_grad()
        for inputs, targets in zip(*(tensor.chunk(4) for tensor in batch(step)), strict=True):
            ((training.model(inputs) - targets).square().mean() / 4).backward()
        training.optimizer.step()
    return keeps_up_with_undisturbed(training, contender)


@situation("two steps on one gradient", "step() is called twice without zero_grad() in between.", KEEPS_UP)
def twice(contender: Contender) -> Outcome:
    training = Training(contender)
    training.run(before_step=lambda step: training.optimizer.step())
    return keeps_up_with_undisturbed(training, contender)


@situation("zero_grad() forgotten", "zero_grad() is called every fifth step only, so gradients pile up.", KEEPS_UP)
def forgotten_zero_grad(contender: Contender) -> Outcome:
    training = Training(contender)
    for step in range(STEPS):
        if step % 5 == 0:
            training.optimizer.zero_grad()
        training.backward(step)
        training.optimizer.step()
    return keeps_up_with_undisturbed(training, contender)


@situation(
    "step() before backward()",
    "The first step comes before there is any gradient.",
    SAME_BITS,
    r"grad",
)
def without_gradients(contender: Contender) -> Outcome:
    training = Training(contender)
    training.optimizer.step()
    return same_bits_as_undisturbed(training.run(100), contender)


@situation("zero_grad(set_to_none=False)", "Gradients are filled with zeros, not removed.", SAME_BITS)
def filled_with_zeros(contender: Contender) -> Outcome:
    training = Training(contender)
    for step in range(100):
        training.optimizer.zero_grad(set_to_none=False)
        training.backward(step)
        training.optimizer.step()
    return same_bits_as_undisturbed(training, contender)


@situation(
    "GradScaler",
    "torch.amp.GradScaler as documented, and one batch whose gradients overflow.",
    KEEPS_UP,
)
def grad_scaler(contender: Contender) -> Outcome:
    training = Training(contender)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        training.optimizer.zero_grad()
        inputs, targets = batch(step)
        scaler.scale((training.model(inputs) - targets).square().mean()).backward()
        if step == LATER:
            training.params()[0].grad.fill_(float("inf"))
        scaler.step(training.optimizer)
        scaler.update()
    return keeps_up_with_undisturbed(training, contender)
