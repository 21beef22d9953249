"""The order of one step: measure, tune, let the base step on copies, and move the parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from mechanic.torch import tuners
from mechanic.torch.base import View, is_linear_in_lr, run_hooks, step_of
from mechanic.torch.buckets import Bucket, parts_of
from mechanic.torch.delta import Noises
from mechanic.torch.layout import DELTA, DELTA_SCALES, FROZEN, PEAK_LR, RESIDUAL, Group, params_of
from mechanic.torch.lists import Scaling, Scratch, is_on_host
from mechanic.torch.private import is_inside_backward, mark_as_stepped
from mechanic.torch.shards import mean_over_copies
from mechanic.torch.wrapped import BaseT, Wrapped
from mechanic.tuner import SUMS, TunerState, delta_retention, total_scale, update


def step(wrapped: Wrapped[Any]) -> None:
    """Move the parameters from x_1 + S Delta to x_1 + S' Delta', where Delta' = k Delta + the base's update."""
    require_all_gradients(wrapped)
    wrapped.check_parameters()
    buckets = wrapped.buckets()
    wrapped.warn_if_nothing_is_trained(buckets)
    if not buckets and wrapped.reduction().group is None:
        return

    # Measure. This comes before the base steps, since it may edit gradients in place.
    betas, tuner = wrapped.read_tuners(buckets)
    sums, grad_sq = _measure(wrapped, buckets, tuner)
    finite = grad_sq.isfinite()  # [tuners]
    if wrapped.skip_nonfinite and not finite.all():
        wrapped.count_skipped_step()
        return
    if not wrapped.skip_nonfinite:
        for bucket in buckets:
            bucket.discard_grads_unless(finite)

    tuned, scaling = tune(wrapped, betas, tuner, sums)
    noises = noises_of(wrapped, tuner)
    move(wrapped, buckets, scaling, noises, begin=lambda: remember(wrapped, betas, tuned, finite))


def move(
    wrapped: Wrapped[Any],
    buckets: list[Bucket],
    scaling: Scaling,
    noises: Noises | None,
    *,
    call: Callable[[Any], Any] = step_of,
    begin: Callable[[], None] = lambda: None,
    view: View | None = None,
) -> None:
    """Let the base step on copies, part by part, and move the parameters.

    ``begin`` is called before the first parameter moves. If the base raises, or something from outside does, every
    parameter is where it was before its move or after it.
    """
    base = wrapped.base
    switches = call is not step_of
    has_hooks = not switches and view is None  # else a caller runs them
    if has_hooks:
        run_hooks(base, after=False)
    view = view or View(base)
    scratch = Scratch()
    for number, part in enumerate(parts_of(base, buckets)):
        scratch.begin()
        steps = [bucket.has_grad or (switches and bucket.moves) for bucket in part]
        copies = [bucket.copies(scaling, scratch) if has else [] for bucket, has in zip(part, steps, strict=True)]
        seen = {p: tensor for bucket, own in zip(part, copies, strict=True) for p, tensor in bucket.see(own).items()}
        try:
            if seen or switches:
                view.call(seen, call, all_groups=switches)
        except Exception as error:
            _say_what_has_changed(error, moved=number > 0)
            raise
        if number == 0:
            begin()
        for bucket, stepped in zip(part, copies, strict=True):
            bucket.move(base.state, stepped, scaling, noises)
    mark_as_stepped(base)
    if has_hooks:
        run_hooks(base, after=True)


def step_frozen(wrapped: Wrapped[Any]) -> None:
    """The base's own step, times the frozen S."""
    buckets = [bucket for bucket in wrapped.buckets() if bucket.has_grad]
    tuner = wrapped.read_tuners(buckets)[1]
    if wrapped.skip_nonfinite:
        squares = sum_by_tuner([(b.row, b.grad_sq(tuner.scales.dtype)) for b in buckets], 1, tuner.scales)
        if not wrapped.sum_over_ranks(squares).isfinite().all():
            wrapped.count_skipped_step()
            return
    scale = total_scale(tuner, torch)
    move(wrapped, buckets, Scaling(scale, scale), None)
    tuners.remember_rates(wrapped.groups)


def switch_mode(wrapped: Wrapped[Any], switch: Callable[[Any], Any]) -> None:
    """Let the base move its own iterates (``train()``, ``eval()``), and move the parameters by S times as much."""
    buckets = wrapped.buckets()
    tuner = wrapped.read_tuners(buckets)[1]
    scale = total_scale(tuner, torch)
    move(wrapped, buckets, Scaling(scale, scale), noises_of(wrapped, tuner), call=switch)


def observe(wrapped: Wrapped[Any]) -> None:
    """Measure the gradients of a held-out batch for the next step."""
    buckets = wrapped.buckets()
    tuner = wrapped.read_tuners(buckets)[1]
    wrapped.keep_observed(mean_over_copies(sums_of(buckets, tuner), wrapped.reduction().group))


def require_all_gradients(wrapped: Wrapped[Any], come: Collection[Tensor] = ()) -> None:
    """Raise inside a backward pass if gradients are still to come, beside those that have: the sums would lack them."""
    if not is_inside_backward():
        return
    waiting = [p.requires_grad and p.grad is None and p not in come for p in params_of(wrapped.groups)]
    if any(waiting):
        raise RuntimeError(
            f"step() was called inside the backward pass, while {sum(waiting)} of {len(waiting)} parameters have "
            "no gradient, and Mechanic's feedback is a sum over all: call step_in_backward() once and step() after "
            "backward(), turn 'fused backward pass' off, or give every parameter that steps by itself a Mechanic of "
            "its own"
        )


# Measure, tune, remember.


def sum_by_tuner(parts: list[tuple[int, Tensor]], width: int, like: Tensor) -> Tensor:
    """Add up parts that come with their tuner's row, [tuners, width]; with the dtype and device of ``like``."""
    sums = torch.zeros(len(like), width, dtype=like.dtype, device=like.device)
    rows = sums.unbind()
    for row, part in parts:
        rows[row].add_(part.to(like))
    return sums


def sums_of(buckets: list[Bucket], tuner: TunerState) -> Tensor:
    """The five sums of this rank, [tuners, 5]."""
    dtype = tuner.scales.dtype
    return sum_by_tuner([(bucket.row, bucket.sums(dtype)) for bucket in buckets], len(SUMS), like=tuner.scales)


def _measure(wrapped: Wrapped[Any], buckets: list[Bucket], tuner: TunerState) -> tuple[Tensor, Tensor]:
    """The five sums that tune, [tuners, 5], and |g|^2 of the gradients that the base steps with, [tuners].

    These differ if the sums were observed on other gradients. They share one collective.
    """
    observed = wrapped.take_observed(like=tuner.scales)
    if observed is None:
        sums = wrapped.sum_over_ranks(sums_of(buckets, tuner))
        return sums, grad_sq_in(sums)
    grad_sq = sum_by_tuner([(b.row, b.grad_sq(tuner.scales.dtype)) for b in buckets], 1, like=tuner.scales)
    *columns, grad_sq = wrapped.sum_over_ranks(torch.cat([observed, grad_sq], -1)).unbind(-1)
    return torch.stack(columns, -1), grad_sq


def grad_sq_in(sums: Tensor) -> Tensor:
    return sums.unbind(-1)[SUMS.index("grad_sq")]


def tune(
    wrapped: Wrapped[Any], betas: Tensor, tuner: TunerState, sums: Tensor, groups: list[Group] | None = None
) -> tuple[TunerState, Scaling]:
    """S becomes S', with the learning rates of the groups, or of what they held when the step began."""
    rates = tuners.read_rates(groups or wrapped.groups, like=tuner.scales)
    tuned = update(tuner, sums, betas, wrapped.config, torch, rates)
    scales = total_scale(tuner, torch), total_scale(tuned, torch)
    retention = delta_retention(tuner, tuned, wrapped.config, torch, rates, scales)
    if retention is not None and is_on_host(retention) and bool((retention == 1).all()):
        retention = None
    return tuned, Scaling(*scales, retention)


def noises_of(wrapped: Wrapped[Any], tuner: TunerState, *, again: bool = False) -> Noises | None:
    """What coded Deltas are rounded with in this step; every step has its number, finite or not.

    If they are rounded ``again`` in one step, that has a number too.
    """
    if wrapped.delta is None:
        return None
    count = tuner.steps[:, 0] + tuner.nonfinite_steps[:, 0]
    return Noises(-1 - count if again else count)


def remember(
    wrapped: Wrapped[Any], betas: Tensor, tuned: TunerState, finite: Tensor, groups: list[Group] | None = None
) -> None:
    """Write down what a step has learned. ``finite``, [tuners], tells whose gradients were."""
    tuners.write_tuners(wrapped.groups, betas, tuned)
    tuners.remember_rates(wrapped.groups, groups)
    wrapped.show_scales()
    wrapped.warn_if_nothing_is_learned(finite)
    wrapped.warn_of_scale(tuned)


def _say_what_has_changed(error: Exception, *, moved: bool) -> None:
    """Add a line below the traceback. Python 3.10 has no such lines."""
    if hasattr(error, "add_note"):
        state = "some parameters have made their step, and with them" if moved else "no parameter has moved, but"
        error.add_note(
            f"Mechanic: the base failed during its update: {state} some of the base's own state may have changed. "
            "Training can go on; to repeat the step exactly, load a checkpoint."
        )


# Keep what was learned: stop tuning, or hand over to the base alone.


def freeze(wrapped: Wrapped[Any]) -> None:
    """Keep S as it is and drop Delta."""
    if wrapped.own_iterates:
        raise TypeError(
            f"{type(wrapped.base).__name__} steps on iterates of its own, which are not scaled, so it cannot go on "
            "without Delta; keep tuning"
        )
    scales = wrapped.scales()
    if not all(scale > 0 for scale in scales.values()):
        raise ValueError(
            f"nothing has been learned yet, the scales are {scales}; take some steps first, and give the optimizer no "
            "group or layer of which nothing is trained"
        )
    for name, sharing in wrapped.by_tuner().items():
        for group in sharing:
            group[FROZEN] = scales[name]
    wrapped.observed = None
    _drop(wrapped, DELTA, DELTA_SCALES)


def release(wrapped: Wrapped[BaseT]) -> BaseT:
    """Multiply the base's learning rates by S, and remove everything of Mechanic's from it."""
    base, groups = wrapped.base, wrapped.groups
    if not is_linear_in_lr(base):
        raise TypeError(
            f"the update of {type(base).__name__} is not known to be proportional to lr, so the learned scale cannot "
            "be handed over as a learning rate; call freeze() and go on with Mechanic"
        )
    if not wrapped.is_frozen:
        freeze(wrapped)
    for group in groups:
        factor = group[FROZEN] / group[PEAK_LR]
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):
            if group.get(key) is not None:
                group[key] = group[key] * factor
    tuners.remove_tuners(groups)
    wrapped.watch_direct_steps(watch=False)
    _drop(wrapped, RESIDUAL)
    base.load_state_dict(base.state_dict())  # casts the moments to the parameters' dtype
    return base


def _drop(wrapped: Wrapped[Any], *names: str) -> None:
    """Remove entries from the state; what was handed out of it keeps them."""
    state = wrapped.base.state
    for p in params_of(wrapped.groups):
        if p in state:
            state[p] = {key: value for key, value in state[p].items() if key not in names}
