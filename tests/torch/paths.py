"""The ways to wrap a base that lead to different code, and probes that do not change which one it takes.

Of torch's bases it is known that they ignore the parameter values and step every parameter by itself, so they start at
zero and step part by part. All others start at the parameters' values and see all of them in one step.
"""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from mechanic.torch import Mechanic
from tests.torch.bases import BY_NAME

Wrap = Callable[..., Mechanic]


def by_default(base: Optimizer, **options: Any) -> Mechanic:
    return Mechanic(base, **options)


def on_copies(base: Optimizer, **options: Any) -> Mechanic:
    """As a subclass of its class, of which nothing is known."""
    base.__class__ = type(type(base).__name__, (type(base),), {"__module__": "unknown"})
    return Mechanic(base, **options)


def in_int8(base: Optimizer, **options: Any) -> Mechanic:
    return Mechanic(base, delta="int8", **options)


def _starts(*cases: tuple[str, Wrap]) -> pytest.MarkDecorator:
    params = [pytest.param(BY_NAME[name], wrap, id=f"{name}-{wrap.__name__}") for name, wrap in cases]
    return pytest.mark.parametrize(("base", "wrap"), params)


STARTS = ("AdamW", by_default), ("AdamW", on_copies), ("Lion", by_default)
every_start = _starts(*STARTS)
"""For what does not depend on the base: from zero or from the parameters' values, all at once or part by part."""

every_start_and_int8 = _starts(*STARTS, ("AdamW", in_int8))
"""Also with Delta in int8, whose rounding the test must allow."""


@contextmanager
def instead_of_its_step(base: Optimizer, stand_in: Callable[[Callable[[], Any], Optimizer], Any]):
    """Call ``stand_in(step, shown)`` wherever the base is to step, as ``shown``; ``step()`` is the base's own.

    The class is patched, so the base has the type that it had.
    """
    kind = type(base)
    step = kind.step

    @functools.wraps(step)
    def replaced(self: Optimizer, closure: Any = None) -> Any:
        return stand_in(lambda: step(self), self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "step", replaced)
        yield


@contextmanager
def failing(base: Optimizer, error: BaseException, *, share: float = 0.0):
    """Let the base raise when it has stepped a share of its parameters: 0 is at once, 1 when it is done."""

    def fail(step: Callable[[], Any], shown: Optimizer) -> None:
        params = [p for group in shown.param_groups for p in group["params"] if p.grad is not None]
        waiting = [(p, p.grad) for p in params[round(share * len(params)) :]]
        for p, _ in waiting:
            p.grad = None
        if len(waiting) < len(params):
            step()
        for p, grad in waiting:
            p.grad = grad
        raise error

    with instead_of_its_step(base, fail):
        yield


def deltas_of(model: torch.nn.Module, optimizer: Mechanic) -> list[torch.Tensor]:
    """Zeros where nothing has moved yet."""
    return [optimizer.state.get(p, {}).get("mechanic_delta", torch.zeros_like(p)).clone() for p in model.parameters()]


def assert_updated_by(updates: list[torch.Tensor], *, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    """Delta' = k Delta + u with the given updates u, and one k for all: by default within 8 % of 1."""
    u, old, new = (torch.cat([t.flatten() for t in tensors]) for tensors in (updates, before, after))
    kept = torch.dot(new - u, old) / torch.dot(old, old) if old.any() else torch.ones((), dtype=old.dtype)
    assert 0.92 - 1e-9 <= kept <= 1.08 + 1e-9
    assert (new - kept * old - u).norm() <= 1e-9 * (u.norm() + old.norm())
