"""The small task every situation disturbs: regression with a network of 212 parameters and noisy targets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from benchmarks.failures.contenders import CONTENDERS, Contender
from benchmarks.failures.verdicts import Outcome, right_if

STEPS = 400
SHARE = 2 / 3  # of the fall in loss of the undisturbed run
KEEPS_UP = "Keeps up with the undisturbed run."
SAME_BITS = "Parameters are bitwise those of the undisturbed run."
HALVED = "Parameters are finite and the loss is at most half of what it was at the start."

Hook = Callable[[int], None]


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


@functools.cache
def batch(step: int, size: int = 64) -> tuple[Tensor, Tensor]:
    weights = 0.3 * torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, 8, generator=generator)
    return inputs, torch.sin(inputs @ weights) + 0.3 * torch.randn(size, 4, generator=generator)


def loss_on(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss, computed in float32 where parameters are of half precision, so that only their rounding matters."""
    dtypes = {p.dtype for p in model.parameters()}
    if dtypes & {torch.float16, torch.bfloat16}:
        values = {name: p.float() for name, p in model.named_parameters()}
        return (functional_call(model, values, inputs) - targets).square().mean()
    dtype = next(iter(dtypes))
    return (model(inputs.to(dtype)) - targets.to(dtype)).square().mean()


class Training:
    """A model and its optimizer, in the usual loop."""

    def __init__(
        self,
        contender: Contender,
        model: nn.Module | None = None,
        groups: Callable[[nn.Module], Iterable[Any]] = lambda model: model.parameters(),
        **options: Any,
    ) -> None:
        self.model = network() if model is None else model
        self.optimizer: Optimizer = contender.build(groups(self.model), **options)

    def switch(self, training: bool) -> None:
        """Tell an optimizer that evaluates at another point than it trains at."""
        switch = getattr(self.optimizer, "train" if training else "eval", None)
        if switch is not None:
            switch()

    def backward(self, step: int, scale: float = 1.0) -> None:
        (scale * loss_on(self.model, *batch(step))).backward()

    def run(
        self,
        steps: int = STEPS,
        first: int = 0,
        scale: float = 1.0,
        before_step: Hook = lambda step: None,
        after_step: Hook = lambda step: None,
    ) -> Training:
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            self.backward(step, scale)
            before_step(step)
            self.optimizer.step()
            after_step(step)
        return self

    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def loss(self) -> float:
        """Over data that is not trained on, at the point where the optimizer wants to be evaluated."""
        self.switch(training=False)
        with torch.no_grad():
            loss = loss_on(self.model, *batch(-1, 1024)).item()
        self.switch(training=True)
        return loss


@functools.cache
def undisturbed(key: str, steps: int = STEPS) -> tuple[float, float]:
    """The loss before and after the plain run of a contender."""
    training = Training(CONTENDERS[key])
    return training.loss(), training.run(steps).loss()


@functools.cache
def undisturbed_values(key: str, steps: int) -> list[Tensor]:
    return Training(CONTENDERS[key]).run(steps).values()


def is_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def keeps_up(training: Training, start: float, expected: float) -> Outcome:
    """Right if the loss has fallen nearly as far as it was expected to."""
    if not is_finite(p.detach() for p in training.params() if p.requires_grad):
        return right_if(False, "parameters are not finite")
    loss = training.loss()
    is_right = start - loss >= SHARE * (start - expected)
    return right_if(is_right, f"loss {loss:.3g}, undisturbed {expected:.3g}, at the start {start:.3g}")


def keeps_up_with_undisturbed(training: Training, contender: Contender, steps: int = STEPS) -> Outcome:
    return keeps_up(training, *undisturbed(contender.key, steps))


def keeps_up_with_model(contender: Contender, model: nn.Module, reference: nn.Module) -> Outcome:
    """Train both models; the run of the reference is the undisturbed one."""
    undisturbed_run = Training(contender, reference)
    start, expected = undisturbed_run.loss(), undisturbed_run.run().loss()
    return keeps_up(Training(contender, model).run(), start, expected)


def halved(start: float, end: float, tensors: list[Tensor]) -> Outcome:
    return right_if(is_finite(tensors) and end <= start / 2, f"loss {start:.3g} to {end:.3g}")


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def same_bits(found: list[Tensor], expected: list[Tensor]) -> Outcome:
    if all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
        return right_if(True, "bitwise the same")
    return right_if(False, f"parameters are off by up to {largest_difference(found, expected):.2g}")


def same_bits_as_undisturbed(training: Training, contender: Contender, steps: int = 100) -> Outcome:
    return same_bits(training.values(), undisturbed_values(contender.key, steps))
