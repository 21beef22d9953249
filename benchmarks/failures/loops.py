"""What training loops do with an optimizer: groups, freezing, closures, errors in the middle of a step."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.failures.contenders import Contender
from benchmarks.failures.task import (
    KEEPS_UP,
    SAME_BITS,
    STEPS,
    Training,
    batch,
    keeps_up_with_undisturbed,
    largest_difference,
    loss_on,
    network,
    same_bits,
    same_bits_as_undisturbed,
    undisturbed_values,
)
from benchmarks.failures.verdicts import WARNED, WRONG, NotApplicable, Outcome, right_if, theme, worst

situation = theme("Training loops")


def _with_closures(contender: Contender, mode: Callable[[], AbstractContextManager[Any]]) -> Outcome:
    """Every step gets a closure, which runs in this mode."""
    training = Training(contender)
    for step in range(100):

        def compute(step: int = step) -> torch.Tensor:
            with mode():
                training.optimizer.zero_grad()
                loss = loss_on(training.model, *batch(step))
                loss.backward()
                return loss

        training.optimizer.step(compute)
    return same_bits_as_undisturbed(training, contender)


@situation("closure", "step(closure) computes the loss and the gradients.", SAME_BITS, "closure")
def closure(contender: Contender) -> Outcome:
    return _with_closures(contender, torch.enable_grad)


@situation(
    "closure without enable_grad",
    "As above, with a closure as in torch's own documentation, which does not enable gradients itself.",
    SAME_BITS,
    "closure",
)
def plain_closure(contender: Contender) -> Outcome:
    return _with_closures(contender, nullcontext)


@situation(
    "maximize=True",
    "The loss is negated and the optimizer is told to maximize.",
    KEEPS_UP,
    "maximize",
)
def maximize(contender: Contender) -> Outcome:
    if not contender.takes("maximize"):
        raise NotApplicable("has no such option")
    training = Training(contender, maximize=True).run(scale=-1.0)
    return keeps_up_with_undisturbed(training, contender)


@situation(
    "group added late",
    "The second layer joins with add_param_group after 50 steps.",
    "The layer moves. " + KEEPS_UP,
    r"group",
)
def late_group(contender: Contender) -> Outcome:
    training = Training(contender, groups=lambda model: model[0].parameters())
    training.run(50)
    before = training.values()[2]
    training.optimizer.add_param_group({"params": list(training.model[2].parameters())})
    training.switch(training=True)
    training.run(STEPS, first=50)
    if torch.equal(training.values()[2], before):
        return right_if(False, "the new group does not move")
    return keeps_up_with_undisturbed(training, contender)


@situation(
    "layer frozen and thawed",
    "From step 50 to step 150 the first layer has requires_grad=False.",
    "The layer stands still meanwhile. " + KEEPS_UP,
)
def frozen(contender: Contender) -> Outcome:
    training = Training(contender).run(50)
    layer = training.model[0]
    before = layer.weight.detach().clone()
    layer.requires_grad_(False)
    training.optimizer.zero_grad()
    training.run(100, first=50)
    if not torch.equal(layer.weight, before):
        return right_if(False, "the frozen layer moved")
    layer.requires_grad_(True)
    return keeps_up_with_undisturbed(training.run(STEPS - 150, first=150), contender)


@situation("empty group", "One of two groups holds no parameters.", SAME_BITS, r"empty|no param")
def empty_group(contender: Contender) -> Outcome:
    groups: Any = lambda model: [{"params": list(model.parameters())}, {"params": []}]  # noqa: E731
    return same_bits_as_undisturbed(Training(contender, groups=groups).run(100), contender)


@situation(
    "parameter in two groups",
    "A layer's weight is given twice.",
    KEEPS_UP,
    r"more than one parameter group|more than once|duplicate",
)
def given_twice(contender: Contender) -> Outcome:
    groups: Any = lambda model: [{"params": list(model.parameters())}, {"params": [model[0].weight]}]  # noqa: E731
    return keeps_up_with_undisturbed(Training(contender, groups=groups).run(), contender)


@situation(
    "two optimizers by turns",
    "Two networks with an optimizer each, as in a GAN.",
    "Both end bitwise where they end alone.",
)
def two_optimizers(contender: Contender) -> Outcome:
    first, second = Training(contender), Training(contender)
    for step in range(100):
        first.run(1, first=step)
        second.run(1, first=step)
    expected = undisturbed_values(contender.key, 100)
    return same_bits([*first.values(), *second.values()], [*expected, *expected])


@situation(
    "compiled model",
    "The model is wrapped in torch.compile (backend aot_eager).",
    KEEPS_UP,
    seconds=300.0,
)
def compiled(contender: Contender) -> Outcome:
    model = network()
    training = Training(contender, model)
    forward = torch.compile(model, backend="aot_eager")
    for step in range(STEPS):
        training.optimizer.zero_grad()
        inputs, targets = batch(step)
        (forward(inputs) - targets).square().mean().backward()
        training.optimizer.step()
    return keeps_up_with_undisturbed(training, contender)


def _with_two_modes(contender: Contender) -> Training:
    training = Training(contender)
    if not hasattr(training.optimizer, "eval"):
        raise NotApplicable("has no train() and eval()")
    return training


@situation(
    "train() and eval() by turns",
    "Every 20 steps the optimizer is switched to evaluation and back.",
    "Parameters are within 1e-4 of the undisturbed run.",
    r"eval|train",
)
def switched(contender: Contender) -> Outcome:
    training = _with_two_modes(contender)

    def switch(step: int) -> None:
        if step % 20 == 19:
            training.loss()

    found = training.run(100, after_step=switch).values()
    distance = largest_difference(found, undisturbed_values(contender.key, 100))
    return right_if(distance <= 1e-4, f"off by {distance:.2g}")


@situation(
    "step() in evaluation mode",
    "train() is forgotten after an evaluation.",
    KEEPS_UP,
    r"train",
)
def forgotten_train(contender: Contender) -> Outcome:
    training = _with_two_modes(contender)
    training.run(200)
    training.switch(training=False)
    return keeps_up_with_undisturbed(training.run(200, first=200), contender)


class _OutOfMemory(TorchDispatchMode):
    """Count operations, and raise once there have been so many."""

    def __init__(self, at: float = float("inf")) -> None:
        super().__init__()
        self.at, self.operations = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if self.operations > self.at:
            raise MemoryError("injected: out of memory")
        return func(*args, **(kwargs or {}))


def _step_under(mode: _OutOfMemory, contender: Contender, training: Training) -> None:
    """A step whose update runs under a mode: AdamW's where that is the optimizer or its base, else all of it."""
    if contender.with_base is None and contender.key != "adamw":
        with mode:
            training.optimizer.step()
        return
    module = importlib.import_module("torch.optim.adam")
    update = module.adam

    def update_under_mode(*tensors: Any, **options: Any) -> None:
        with mode:
            update(*tensors, **options)

    module.adam = update_under_mode
    try:
        training.optimizer.step()
    finally:
        module.adam = update


@torch.enable_grad()
def _fail_and_retry(contender: Contender, at: float) -> Outcome:
    """Fail where a share of the update's operations has been done."""
    training, twin = (Training(contender).run(100) for _ in range(2))
    for each in (training, twin):
        each.optimizer.zero_grad()
        each.backward(100)
    counter = _OutOfMemory()
    _step_under(counter, contender, twin)
    before = training.values()
    try:
        _step_under(_OutOfMemory(at * counter.operations), contender, training)
    except MemoryError as error:
        said = " ".join(getattr(error, "__notes__", []))
    else:
        raise AssertionError("no error was injected")
    moved = largest_difference(training.values(), before)
    if not moved <= 1e-6:
        verdict = WARNED if re.search("have made their step|half-way|partly", said) else WRONG
        return Outcome(verdict, f"after the error parameters are off by up to {moved:.2g}")
    training.optimizer.step()
    return keeps_up_with_undisturbed(training.run(STEPS - 101, first=101), contender)


AS_BEFORE = "After the error parameters are as before, to 1e-6. "


@situation(
    "update fails at its start",
    "The update (the base's, where there is one) runs out of memory at its first operation. The step is tried again.",
    AS_BEFORE + KEEPS_UP,
)
def fails_at_its_start(contender: Contender) -> Outcome:
    return _fail_and_retry(contender, 0.0)


@situation(
    "update fails half-way",
    "As above, after 25%, 50%, 75% or 90% of the update's operations; the worst counts.",
    AS_BEFORE + KEEPS_UP,
)
def fails_half_way(contender: Contender) -> Outcome:
    return worst({f"after {at:.0%}": _fail_and_retry(contender, at) for at in (0.25, 0.5, 0.75, 0.9)})


@situation(
    "steps without any gradient",
    "After 50 steps step() is called 10 times while no parameter has a gradient.",
    SAME_BITS,
)
def nothing_to_do(contender: Contender) -> Outcome:
    training = Training(contender).run(50)
    training.optimizer.zero_grad()
    for _ in range(10):
        training.optimizer.step()
    return same_bits_as_undisturbed(training.run(50, first=50), contender)
