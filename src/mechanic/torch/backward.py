"""Stepping inside the backward pass: gradients come one by one, and are freed as soon as they were used.

When the gradient of a parameter is there, its part of the five sums is measured, and the base steps on it, with the S
of before: x = x_1 + S (Delta + u). Small ones wait for each other, since calls would cost more than the work. When all
have come, S' and k are known, and a move without gradients brings the parameters to x_1 + S' Delta' with
Delta' = k (Delta + u).

In the usual step Delta' = k Delta + u. What u was is not known any more when k is, and keeping it would take as much
memory as the gradients. So k, the share of Delta that is kept, acts on the newest update as well, as if the learning
rate of this step were k times as large. All else is the same.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mechanic.torch import tuners
from mechanic.torch.base import View, steps_one_by_one
from mechanic.torch.private import is_inside_backward, outside_of_compiled_code
from mechanic.torch.step import device_of, grad_sq_in, move, standing, sums_of, trained, tune
from mechanic.torch.wrapped import Wrapped

WAITING = 1 << 18
"""Elements of gradients that wait until they are stepped with together: 1 MB in float32, or one larger tensor."""

_OBSERVED = (
    "observe() needs gradients that are still there after backward(), and inside the backward pass they are stepped "
    "with; use one of the two"
)


@dataclass
class _Step:
    """A step that is being made."""

    view: View  # of the base as it was when the first gradient came
    trained: dict[Tensor, None]  # in order
    taken: set[Tensor] = field(default_factory=set)  # whose gradients have been taken away
    waiting: dict[Tensor, Tensor] = field(default_factory=dict)  # gradients that have not been stepped with yet
    elements: int = 0  # of these
    sums: Tensor | None = None  # of all others that were taken, [tuners, 5]


class BackwardSteps:
    """Makes steps of gradients that come one by one. If ``hooked``, hooks on the parameters bring them."""

    def __init__(self, wrapped: Wrapped[Any], hooked: bool = False) -> None:
        self._wrapped = wrapped
        self._hooked = hooked
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._step: _Step | None = None
        self._lock = threading.RLock()  # if parameters are on several devices, hooks run in several threads
        self._set_hooks()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._wrapped, self._hooked)

    @property
    def has_begun(self) -> bool:
        """Whether a gradient has come since the last step."""
        return self._step is not None

    def refuse_unfinished(self, action: str) -> None:
        """Raise between a backward pass and the step() that ends its step, on this rank perhaps alone."""
        if self.has_begun:
            raise RuntimeError(
                f"{action} between backward() and step(): with step_in_backward() half of a step has been made then. "
                "Call step() first, or zero_grad() if the backward pass was broken off"
            )

    def hook(self, enabled: bool) -> None:
        """Have hooks on all parameters, or none."""
        self.refuse_unfinished("step_in_backward() was called")
        if enabled:
            self._refuse_unsuitable()
        self._hooked = enabled
        self._set_hooks()

    def refuse_observation(self) -> None:
        """Raise if the gradients of a held-out batch would be stepped with before they can be observed."""
        if self._hooked or self.has_begun:
            raise RuntimeError(_OBSERVED)

    @outside_of_compiled_code
    @torch.no_grad()
    def take(self, p: Tensor) -> None:
        """Take the gradient of a parameter away, and step with it, now or together with the next ones."""
        if p.grad is None:
            return
        with self._lock:
            step = self._step or self._begin()
            if p in step.taken:
                raise RuntimeError(
                    "a second gradient of a parameter has come before step(): inside the backward pass gradients "
                    "cannot be accumulated over several backward passes. Call step() after every one of them, or "
                    "zero_grad() if one was broken off; or accumulate without step_in_backward()"
                )
            if p not in step.trained:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is not one that this optimizer trains")
            step.taken.add(p)
            step.waiting[p], p.grad = p.grad, None
            step.elements += p.numel()
            if step.elements >= WAITING:
                self._step_waiting(step)

    def step(self) -> bool:
        """End a step, whether gradients have come or not: all ranks have to. False if this is not the way to step."""
        if not (self._hooked or self.has_begun):
            require_all_gradients(self._wrapped.params)
            return False
        with self._lock:
            step = self._step or self._begin()
            require_all_gradients(self._wrapped.params, step.taken)
            for p in [p for p in step.trained if p not in step.taken]:
                self.take(p)  # if it has no hook
            self._step = None
            self._step_waiting(step)
            if self._wrapped.is_frozen:
                tuners.remember_rates(self._wrapped.groups, step.view.groups)
            else:
                self._finish(step)
            self._wrapped.run_hooks(after=True)
            self._set_hooks()  # parameters may have been added, thawed, or swapped for sharded ones
        return True

    def discard(self) -> None:
        """Forget the gradients that have come, of a backward pass that was broken off. Their updates stay."""
        self._step = None

    def give_up(self) -> None:
        """Forget the gradients that have come. Warn if they are all, and leave a pass that still runs alone."""
        if is_inside_backward():
            return
        if self._step is not None and len(self._step.taken) == len(self._step.trained):
            self._wrapped.warn_once(
                "missing step",
                "the gradients of a whole backward pass have come, and step() was not called before zero_grad(): "
                "Mechanic learns nothing from such a pass. With step_in_backward(), too, call step() after backward()",
            )
        self.discard()

    def _begin(self) -> _Step:
        wrapped = self._wrapped
        wrapped.require_assigned_groups()
        self._refuse_unsuitable()
        if wrapped.observed is not None:
            raise RuntimeError(_OBSERVED)
        wrapped.settle_peak_lr()
        wrapped.check_parameters()
        wrapped.run_hooks(after=False)
        self._step = _Step(View(wrapped.base), dict.fromkeys(p for p in wrapped.params if p.requires_grad))
        return self._step

    def _step_waiting(self, step: _Step) -> None:
        """Measure the parameters that wait, and let the base step on them, with the S of before."""
        if not step.waiting:
            return
        waiting, step.waiting, step.elements = step.waiting, {}, 0
        wrapped = self._wrapped
        try:
            for p, grad in waiting.items():
                p.grad = grad
            buckets = trained(wrapped, waiting, step.view.groups)
            tuner = tuners.read_tuners(wrapped.groups, device_of(buckets))[1]
            finite = None
            if not wrapped.is_frozen:
                sums = sums_of(buckets, tuner)
                finite = grad_sq_in(sums).isfinite()
                step.sums = sums if step.sums is None else step.sums + sums.to(step.sums)
            move(wrapped, step.view, buckets, standing(tuner, finite))
        finally:
            for p in waiting:
                p.grad = None

    def _finish(self, step: _Step) -> None:
        """From x_1 + S (Delta + u) to x_1 + S' k (Delta + u)."""
        wrapped = self._wrapped
        buckets = trained(wrapped, held=step.view.groups)
        betas, tuner = tuners.read_tuners(wrapped.groups, device_of(buckets))
        sums = sums_of(trained(wrapped, step.trained.keys() - step.taken), tuner)  # those without a gradient count
        if step.sums is not None:
            sums += step.sums.to(sums)
        sums = wrapped.sum_over_ranks(sums)
        tuned, scaling = tune(wrapped, betas, tuner, sums, None, step.view.groups, again=True)
        wrapped.remember(betas, tuned, step.view.groups)
        move(wrapped, step.view, buckets, scaling)

    def _refuse_unsuitable(self) -> None:
        if self._wrapped.skip_nonfinite:
            raise ValueError(
                "skip_nonfinite=True needs all gradients before the first parameter steps, and inside the backward "
                "pass they come one by one; build Mechanic without it, which replaces NaN and infinity by zeros"
            )
        if not steps_one_by_one(self._wrapped.base):
            raise TypeError(
                f"{type(self._wrapped.base).__name__} is not known to step every parameter by itself, so it cannot "
                "step inside the backward pass; step after backward()"
            )
        self._wrapped.reduction().require_final_gradients(self._wrapped.params)

    def _set_hooks(self) -> None:
        """Have a hook on every parameter that is trained, if hooks are wanted."""
        trained = {p for p in self._wrapped.params if p.requires_grad} if self._hooked else set()
        for p in self._handles.keys() - trained:
            self._handles.pop(p).remove()
        known = weakref.ref(self)  # a parameter may live longer than its optimizer

        def take(p: Tensor) -> None:
            if (steps := known()) is not None:
                steps.take(p)

        for p in trained - self._handles.keys():
            self._handles[p] = p.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]


def require_all_gradients(params: Iterable[Tensor], taken: Collection[Tensor] = ()) -> None:
    """Raise inside a backward pass if gradients are still to come, beside those that have: the sums would lack them."""
    if not is_inside_backward():
        return
    waiting = [p.requires_grad and p.grad is None and p not in taken for p in params]
    if any(waiting):
        raise RuntimeError(
            f"step() was called inside the backward pass, while {sum(waiting)} of {len(waiting)} parameters have "
            "no gradient, and Mechanic's feedback is a sum over all: call step_in_backward() once and step() after "
            "backward(), turn 'fused backward pass' off, or give every parameter that steps by itself a Mechanic of "
            "its own"
        )
