"""Stepping inside the backward pass: gradients come one by one, and are freed as soon as they were used.

When the gradient of a parameter is there, its part of the five sums is measured, and the base steps on it, with the S
of before: x = x_1 + S (Delta + u). Small ones wait for each other, since calls would cost more than the work. When all
have come, S' and k are known, and a pass over Delta, which needs no gradients, brings the parameters to
x_1 + S' Delta' with Delta' = k (Delta + u).

In the usual step Delta' = k Delta + u. What u was is not known any more when k is, and keeping it would take as much
memory as the gradients. So k, the share of Delta that is kept, acts on the newest update as well, as if the learning
rate of this step were k times as large. All else is the same.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mechanic.torch import capture, freezing
from mechanic.torch.arrays import array_module
from mechanic.torch.base_step import counting_from, numbers_in, shown_only
from mechanic.torch.buckets import Scaling
from mechanic.torch.layout import Group, params_of
from mechanic.torch.private import is_inside_backward, mark_as_stepped, outside_of_compiled_code
from mechanic.torch.probe import steps_one_by_one
from mechanic.torch.shards import Reduction, require_final_gradients
from mechanic.torch.step import remember, require_all_gradients, sum_by_tuner, tune
from mechanic.torch.stored import PART, StoredBucket, noises_of
from mechanic.torch.tuners import remember_rates, rows_of
from mechanic.torch.wrapped import Wrapped
from mechanic.tuner import SUMS, total_scale

WAITING = 1 << 18
"""Elements of gradients that wait until they are stepped with together: 1 MB in float32, or one larger tensor."""

_GRAD_SQ = SUMS.index("grad_sq")
_OBSERVED = (
    "observe() needs gradients that are still there after backward(), and inside the backward pass they are stepped "
    "with; use one of the two"
)


@dataclass
class _Place:
    """Where the optimizer has a parameter."""

    group: Group
    number: int  # among the parameters that are trained


@dataclass
class _Step:
    """A step that is being made."""

    reduction: Reduction
    begun_with: list[tuple[Group, dict[str, Any]]]  # the groups, and the numbers they had
    places: dict[Tensor, _Place]  # of all parameters that are trained
    come: set[Tensor] = field(default_factory=set)  # whose gradients have come
    waiting: dict[Tensor, Tensor] = field(default_factory=dict)  # gradients that have not been stepped with yet
    elements: int = 0  # of these
    sums: dict[int, Tensor] = field(default_factory=dict)  # of all others that have come, [5] by row of the tuner


@contextmanager
def _as_begun(step: _Step) -> Iterator[None]:
    """Every part of a step counts from the same numbers, and has the learning rates that the first part had."""
    with ExitStack() as stack:
        for group, numbers in step.begun_with:
            stack.enter_context(counting_from(group, numbers))
        yield


class Arrivals:
    """Makes steps of gradients that come one by one. If ``hooked``, hooks on the parameters bring them."""

    def __init__(self, wrapped: Wrapped[Any], hooked: bool = False) -> None:
        self._wrapped = wrapped
        self._hooked = hooked
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._step: _Step | None = None
        self._is_suitable = False
        self._lock = threading.RLock()  # if parameters are on several devices, hooks run in several threads
        self._set_hooks()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._wrapped, self._hooked)

    @property
    def has_begun(self) -> bool:
        """Whether a gradient has come since the last step."""
        return self._step is not None

    @property
    def all_have_come(self) -> bool:
        return self._step is not None and len(self._step.come) == len(self._step.places)

    def hook(self, enabled: bool) -> None:
        """Have hooks on all parameters, or none."""
        if enabled:
            self._refuse_unsuitable()
            require_final_gradients(params_of(self._wrapped.groups), self._wrapped.reduction().group)
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
            if p in step.come:
                raise RuntimeError(
                    "a second gradient of a parameter has come before step(): inside the backward pass gradients "
                    "cannot be accumulated over several backward passes. Call step() after every one of them, or "
                    "zero_grad() if one was broken off; or accumulate without step_in_backward()"
                )
            if p not in step.places:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is not one that this optimizer trains")
            step.come.add(p)
            step.waiting[p], p.grad = p.grad, None
            step.elements += p.numel()
            if step.elements >= WAITING:
                with _as_begun(step):
                    self._step_waiting(step)

    def step(self) -> bool:
        """End a step, whether gradients have come or not: all ranks have to. False if this is not the way to step."""
        if not (self._hooked or self.has_begun):
            return False
        if not self.has_begun:
            self._begin()
        self.end()
        return True

    @torch.no_grad()
    def end(self) -> None:
        """Tune, now that all gradients have come, and go to the new S; do nothing if no gradient has come."""
        with self._lock:
            if self._step is None:
                return
            require_all_gradients(self._wrapped, self._step.come)
            for p in self._step.places:
                self.take(p)  # if it has no hook
            step, self._step = self._step, None
            with _as_begun(step):
                self._step_waiting(step)
                if self._wrapped.is_frozen:
                    remember_rates(self._wrapped.groups)  # of those without a gradient, too
                else:
                    self._finish(step)
            self._set_hooks()  # parameters may have been added, thawed, or swapped for sharded ones

    def give_up(self) -> None:
        """Forget the gradients that have come, of a backward pass that was broken off. Their updates stay."""
        self._step = None

    def warn_of_missing_step(self) -> None:
        """Warn if a whole backward pass is about to be given up."""
        if self.all_have_come:
            self._wrapped.warn_once.step_is_missing()

    def _begin(self) -> _Step:
        wrapped = self._wrapped
        wrapped.require_assigned_groups()
        self._refuse_unsuitable()
        if capture.is_capturing(wrapped.groups):
            capture.refuse("gradients that are stepped with one by one are gathered on the host; step after backward()")
        if wrapped.observed is not None:
            raise RuntimeError(_OBSERVED)
        wrapped.settle_peak_lr()
        wrapped.missing.check(wrapped.groups, wrapped.base.state)
        reduction = wrapped.reduction()
        require_final_gradients(params_of(wrapped.groups), reduction.group)
        if wrapped.is_frozen:
            freezing.scales_by_lr(wrapped)
        places: dict[Tensor, _Place] = {}
        for group in wrapped.groups:
            for p in group["params"]:
                if p.requires_grad:
                    places[p] = _Place(group, len(places))
        self._step = _Step(reduction, [(group, numbers_in(group)) for group in wrapped.groups], places)
        return self._step

    def _step_waiting(self, step: _Step) -> None:
        """Step with the gradients that wait, as if the optimizer had no other parameters."""
        if not step.waiting:
            return
        waiting, step.waiting, step.elements = step.waiting, {}, 0
        shown: dict[int, tuple[Group, list[Tensor]]] = {}
        for p, grad in waiting.items():
            group = step.places[p].group
            shown.setdefault(id(group), (group, []))[1].append(p)
            p.grad = grad
        try:
            with shown_only(self._wrapped.base, list(shown.values())):
                if self._wrapped.is_frozen:
                    freezing.step_frozen(self._wrapped)
                else:
                    self._step_shown(step)
        finally:
            for p in waiting:
                p.grad = None

    def _step_shown(self, step: _Step) -> None:
        """Measure the parameters that are shown, and let the base step on them, with the S of before."""
        wrapped = self._wrapped
        _, buckets = wrapped.reduction_and_buckets(wrapped.decays_beside_delta())
        tuner = wrapped.read_tuners(buckets)[1]
        sums = sum_by_tuner([(bucket.row, bucket.measure()) for bucket in buckets], len(SUMS), like=tuner.scales)
        finite = array_module(sums.device).isfinite(sums.unbind(-1)[_GRAD_SQ])
        scale = total_scale(tuner, torch)
        scaling = Scaling(scale, scale, noises=noises_of(wrapped.delta, tuner))
        for bucket in buckets:
            bucket.discard_grads_unless(finite)
            bucket.scale_with(scaling)
            if isinstance(bucket, StoredBucket):
                bucket.number_as([step.places[p].number for p in bucket.params])
        for bucket, stepped in zip(buckets, wrapped.step_base(buckets), strict=True):
            bucket.move(stepped)
        for row, of_row in zip(sorted(rows_of(wrapped.groups)), sums.unbind(), strict=True):
            step.sums[row] = step.sums[row] + of_row.to(step.sums[row]) if row in step.sums else of_row

    def _finish(self, step: _Step) -> None:
        """From x_1 + S (Delta + u) to x_1 + S' k (Delta + u)."""
        wrapped = self._wrapped
        waiting = [(group, [p for p in group["params"] if p not in step.come]) for group in wrapped.groups]
        with shown_only(wrapped.base, waiting):  # without a gradient, they count as well
            parts = [(bucket.row, bucket.measure()) for bucket in wrapped.reduction_and_buckets()[1]]
        reduction, buckets = wrapped.reduction_and_buckets()
        betas, tuner = wrapped.read_tuners(buckets)
        rows = rows_of(wrapped.groups)
        parts += [(rows[row], sums) for row, sums in step.sums.items()]
        sums = reduction.sum(sum_by_tuner(parts, len(SUMS), like=tuner.scales))
        tuned, scaling = tune(wrapped, betas, tuner, sums, steps_again=True)
        for bucket in buckets:
            for some in bucket.split(PART):  # half-precision parameters are worked on in float32
                some.scale_with(scaling)
                some.move([])
        remember(wrapped, betas, tuned, array_module(sums.device).isfinite(sums.unbind(-1)[_GRAD_SQ]))

    def _refuse_unsuitable(self) -> None:
        if self._is_suitable:
            return
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
        self._is_suitable = True

    def _set_hooks(self) -> None:
        """Have a hook on every parameter that is trained, if hooks are wanted."""
        trained = {p for p in params_of(self._wrapped.groups) if p.requires_grad} if self._hooked else set()
        for p in self._handles.keys() - trained:
            self._handles.pop(p).remove()
        known = weakref.ref(self)  # a parameter may live longer than its optimizer

        def take(p: Tensor) -> None:
            if (arrivals := known()) is not None:
                arrivals.take(p)

        for p in trained - self._handles.keys():
            self._handles[p] = p.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]


class StepsInBackward(Optimizer):
    """The methods of :class:`mechanic.torch.Mechanic` that step inside the backward pass."""

    _arrivals: Arrivals

    def step_in_backward(self, enabled: bool = True) -> None:
        """Step each parameter inside ``backward()``, as soon as its gradient is there, and free the gradient.

        So the gradients are never all there at the same time. Call this once, and leave the training loop as it is:
        ``step()`` after ``backward()`` then only tunes, and moves the parameters to the new scale. With
        ``enabled=False`` all is as before.

        There is nothing left to clip after ``backward()``: ``docs/memory.md`` tells what can be had instead, and what
        is promised of NaN and infinite gradients. One backward pass is one step: gradients cannot be accumulated over
        several. DDP, ``skip_nonfinite``, ``observe()`` and bases that look at several parameters at once are refused.

        Example:
            >>> import torch
            >>> from mechanic.torch import Mechanic
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
            >>> optimizer.step_in_backward()
            >>> for _ in range(3):
            ...     model(torch.ones(8, 4)).square().mean().backward()
            ...     optimizer.step()
            >>> model.weight.grad is None
            True
        """
        self._arrivals.end()
        self._arrivals.hook(enabled)

    def step_parameter(self, parameter: Tensor, group: Group | None = None, i: int | None = None) -> None:
        """Step one parameter and take its gradient, for trainers with hooks of their own; call ``step()`` at the end.

        OneTrainer calls it so. ``group`` and ``i``, where it is in there, are not needed.
        """
        self._arrivals.take(parameter)

    def step_param(self, p: Tensor, group: Group | None = None) -> None:
        """The same for trainers that never call ``step()``, as sd-scripts: the step ends when all gradients have come.

        If some parameters have no gradient, ``step()`` has to be called.
        """
        self._arrivals.take(p)
        if self._arrivals.all_have_come:
            self._arrivals.end()
            mark_as_stepped(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients. After a backward pass that was broken off, this also forgets what had come of it."""
        if not is_inside_backward():
            self._arrivals.warn_of_missing_step()
            self._arrivals.give_up()
        super().zero_grad(set_to_none)
