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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mechanic.torch.base import View, steps_one_by_one
from mechanic.torch.private import is_inside_backward, outside_of_compiled_code
from mechanic.torch.step import are_finite, move, standing, sums_of, trained, tune
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
    taken: dict[Tensor, bool]  # whether the gradient of a parameter that is trained has been taken away
    waiting: dict[Tensor, Tensor] = field(default_factory=dict)  # gradients that have not been stepped with yet
    elements: int = 0  # of these
    sums: Tensor | None = None  # of all others that were taken, [tuners, 5]


class BackwardSteps:
    """Makes steps of gradients that come one by one. If ``hooked``, hooks on the parameters bring them."""

    def __init__(self, wrapped: Wrapped[Any], hooked: bool = False) -> None:
        self._wrapped = wrapped
        self._hooked = hooked
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._step: _Step | None = None  # from its first gradient on
        self._lock = threading.RLock()  # if parameters are on several devices, hooks run in several threads
        self._set_hooks()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._wrapped, self._hooked)

    def refuse_unfinished(self, action: str) -> None:
        """Raise between a backward pass and the step() that ends its step, on this rank perhaps alone."""
        if self._step:
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
        if self._hooked or self._step:
            raise RuntimeError(_OBSERVED)

    @outside_of_compiled_code
    @torch.no_grad()
    def take(self, p: Tensor) -> None:
        """Take the gradient of a parameter away, and step with it, now or together with the next ones."""
        if p.grad is None:
            return
        with self._lock:
            step = self._step or self._begin()
            if p not in step.taken:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is not one that this optimizer trains")
            if step.taken[p]:
                raise RuntimeError(
                    "a second gradient of a parameter has come before step(): inside the backward pass gradients "
                    "cannot be accumulated over several backward passes. Call step() after every one of them, or "
                    "zero_grad() if one was broken off; or accumulate without step_in_backward()"
                )
            step.taken[p] = True
            step.waiting[p], p.grad = p.grad, None
            step.elements += p.numel()
            if step.elements >= WAITING:
                self._step_waiting(step)

    def step(self) -> bool:
        """End a step, whether gradients have come or not: all ranks have to. False if this is not the way to step."""
        self._require_all_gradients()
        if not (self._hooked or self._step):
            return False
        wrapped = self._wrapped
        with self._lock:
            step = self._step or self._begin()
            held = step.view.groups
            for p, is_taken in step.taken.items():
                if not is_taken:
                    self.take(p)  # if it has no hook
            self._step = None
            self._step_waiting(step)
            if wrapped.is_frozen:
                wrapped.remember(None, held)
            else:  # from x_1 + S (Delta + u) to x_1 + S' k (Delta + u)
                missing, *_ = trained(wrapped, {p for p, is_taken in step.taken.items() if not is_taken})
                buckets, betas, tuner = trained(wrapped, held=held)
                sums = sums_of(missing, tuner)  # those without a gradient count
                if step.sums is not None:
                    sums += step.sums.to(sums)
                sums = wrapped.sum_over_ranks(sums)
                tuned, factors_of = tune(wrapped, betas, tuner, sums, held=held)
                wrapped.remember((betas, tuned), held)
                move(wrapped, step.view, buckets, factors_of)
            wrapped.run_hooks(after=True)
            self._set_hooks()  # parameters may have been added, thawed, or swapped for sharded ones
        return True

    def discard(self) -> None:
        """Forget the gradients that have come, of a backward pass that was broken off. Their updates stay."""
        self._step = None

    def give_up(self) -> None:
        """Forget the gradients that have come. Warn if they are all, and leave a pass that still runs alone."""
        if is_inside_backward():
            return
        if self._step is not None and all(self._step.taken.values()):
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
        self._step = _Step(View(wrapped.base), {p: False for p in wrapped.params if p.requires_grad})
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
            buckets, _, tuner = trained(wrapped, waiting, step.view.groups)
            finite = None
            if not wrapped.is_frozen:
                sums = sums_of(buckets, tuner)
                finite = are_finite(sums)
                step.sums = sums if step.sums is None else step.sums + sums.to(step.sums)
            move(wrapped, step.view, buckets, standing(tuner, finite))
        finally:
            for p in waiting:
                p.grad = None

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

    def _require_all_gradients(self) -> None:
        """Raise inside a backward pass if gradients are still to come: the sums would lack them."""
        if not is_inside_backward():
            return
        taken = {} if self._step is None else self._step.taken
        waiting = [p.requires_grad and p.grad is None and not taken.get(p) for p in self._wrapped.params]
        if any(waiting):
            raise RuntimeError(
                f"step() was called inside the backward pass, while {sum(waiting)} of {len(waiting)} parameters have "
                "no gradient, and Mechanic's feedback is a sum over all: call step_in_backward() once and step() after "
                "backward(), turn 'fused backward pass' off, or give each parameter that steps alone its own Mechanic"
            )
