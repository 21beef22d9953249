"""The order of one step: measure, tune, let the base step on copies, and move the parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from mechanic.torch import tuners
from mechanic.torch.base import View, has_method, starts_of, steps_one_by_one
from mechanic.torch.buckets import Bucket, Scaling, buckets_of, parts_of
from mechanic.torch.layout import Group, rows_of
from mechanic.torch.lists import is_on_host
from mechanic.torch.wrapped import Wrapped
from mechanic.tuner import SUMS, TunerState, delta_retention, total_scale, update


def step(wrapped: Wrapped[Any]) -> None:
    """Move the parameters from x_1 + S Delta to x_1 + S' Delta', where Delta' = k Delta + the base's update."""
    wrapped.check_parameters()
    buckets = trained(wrapped)
    wrapped.warn_if_nothing_is_trained(any(bucket.moves for bucket in buckets))
    if buckets or wrapped.reduction().group is not None:
        (_step_frozen if wrapped.is_frozen else _step)(wrapped, buckets)


def _step(wrapped: Wrapped[Any], buckets: list[Bucket]) -> None:
    betas, tuner = tuners.read_tuners(wrapped.groups, device_of(buckets))
    sums, grad_sq = _measure(wrapped, buckets, tuner)  # before the base steps: it may edit gradients
    finite = grad_sq.isfinite()  # [tuners]
    if wrapped.skip_nonfinite and not finite.all():
        wrapped.count_skipped_step()
        return
    tuned, scaling = tune(wrapped, betas, tuner, sums, finite)
    step_base(wrapped, buckets, scaling, begin=lambda: wrapped.remember(betas, tuned))


def _step_frozen(wrapped: Wrapped[Any], buckets: list[Bucket]) -> None:
    """The base's own step, times the frozen S."""
    tuner = tuners.read_tuners(wrapped.groups, device_of(buckets))[1]
    if wrapped.skip_nonfinite and not wrapped.sum_over_ranks(_grad_sq_of(buckets, tuner)).isfinite().all():
        wrapped.count_skipped_step()
        return
    with_grad = [bucket for bucket in buckets if bucket.has_grad]
    step_base(wrapped, with_grad, standing(tuner), begin=lambda: tuners.remember_rates(wrapped.groups))


def step_base(wrapped: Wrapped[Any], buckets: list[Bucket], scaling: Scaling, *, begin: Callable[[], None]) -> None:
    """Let the base step, with the hooks on its step."""
    wrapped.run_hooks(after=False)
    move(wrapped, View(wrapped.base), buckets, scaling, begin=begin)
    wrapped.run_hooks(after=True)


def move(
    wrapped: Wrapped[Any],
    view: View,
    buckets: list[Bucket],
    scaling: Scaling,
    *,
    method: str = "step",
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Let the base step on copies, part by part, or call its ``train`` or ``eval``, and move the parameters.

    ``begin`` is called before the first parameter moves. If the base raises, or something from outside does, every
    parameter is where it was before its move or after it.
    """
    number = 0
    try:
        for number, part in enumerate(parts_of(buckets, one_by_one=steps_one_by_one(wrapped.base))):
            _move_part(wrapped.base.state, view, part, scaling, method, begin if number == 0 else lambda: None)
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            some = "some parameters have made their step" if number else "no parameter has moved"
            error.add_note(
                f"Mechanic: the step failed: {some}. Some of the base's own state may have changed. "
                "Training can go on; to repeat the step exactly, load a checkpoint."
            )
        raise


def _move_part(
    state: Any, view: View, part: list[Bucket], scaling: Scaling, method: str, begin: Callable[[], None]
) -> None:
    switches = method != "step"
    acts = [bucket.has_grad or (switches and bucket.moves) for bucket in part]
    copies = [b.copies(scaling.of(b)) if acts_on else [] for b, acts_on in zip(part, acts, strict=True)]
    seen: dict[Tensor, Tensor] = {}
    for bucket, own in zip(part, copies, strict=True):
        seen |= bucket.seen(own, scaling.of(bucket))
    if seen or switches:
        view.act(seen, method)
    begin()
    for bucket, stepped in zip(part, copies, strict=True):
        bucket.move(state, stepped, scaling.of(bucket))


def switch_mode(wrapped: Wrapped[Any], mode: str) -> None:
    """Let the base move its own iterates (``train()``, ``eval()``), and move the parameters by S times as much."""
    if has_method(wrapped.base, mode):
        wrapped.require_assigned_groups()
        buckets = trained(wrapped)
        tuner = tuners.read_tuners(wrapped.groups, device_of(buckets))[1]
        move(wrapped, View(wrapped.base), buckets, standing(tuner), method=mode)


def observe(wrapped: Wrapped[Any]) -> None:
    """Measure the gradients of a held-out batch for the next step."""
    buckets = trained(wrapped)
    tuner = tuners.read_tuners(wrapped.groups, device_of(buckets))[1]
    sums = wrapped.reduction().mean_over_copies(sums_of(buckets, tuner))
    wrapped.observed = dict(zip(rows_of(wrapped.groups), sums.unbind(), strict=True))


# Measure and tune.


def trained(
    wrapped: Wrapped[Any], chosen: Collection[Tensor] | None = None, held: list[Group] | None = None
) -> list[Bucket]:
    """The parameters that are trained, or some of them, in lists. ``held`` is what the groups held before."""
    groups = held or wrapped.groups
    start_of = starts_of(wrapped.base, groups, wrapped.delta, own_iterates=wrapped.own_iterates)
    options = wrapped.delta, wrapped.is_frozen
    return buckets_of(groups, wrapped.base.state, start_of, wrapped.reduction(), *options, chosen)


def device_of(buckets: list[Bucket]) -> torch.device | None:
    """Where the tuners are worked on."""
    return buckets[0].device if buckets else None


def sums_of(buckets: list[Bucket], tuner: TunerState) -> Tensor:
    """The five sums of this rank, [tuners, 5]."""
    return _by_tuner([(bucket.row, bucket.sums(tuner.scales.dtype)) for bucket in buckets], len(SUMS), tuner)


def _grad_sq_of(buckets: list[Bucket], tuner: TunerState) -> Tensor:
    """|g|^2 of this rank, [tuners, 1]."""
    return _by_tuner([(bucket.row, bucket.grad_sq(tuner.scales.dtype)) for bucket in buckets], 1, tuner)


def _by_tuner(parts: list[tuple[int, Tensor]], width: int, tuner: TunerState) -> Tensor:
    """Add up parts that come with their tuner's row, [tuners, width]."""
    sums = torch.zeros(len(tuner.scales), width, dtype=tuner.scales.dtype, device=tuner.scales.device)
    rows = sums.unbind()
    for row, part in parts:
        rows[row].add_(part.to(sums))
    return sums


def grad_sq_in(sums: Tensor) -> Tensor:
    return sums.unbind(-1)[SUMS.index("grad_sq")]


def _measure(wrapped: Wrapped[Any], buckets: list[Bucket], tuner: TunerState) -> tuple[Tensor, Tensor]:
    """The five sums that tune, [tuners, 5], and |g|^2 of the gradients that the base steps with, [tuners].

    These differ if the sums were observed on other gradients. They share one collective.
    """
    if wrapped.observed is None:
        sums = wrapped.sum_over_ranks(sums_of(buckets, tuner))
        return sums, grad_sq_in(sums)
    grad_sq = _grad_sq_of(buckets, tuner)
    none = grad_sq.new_zeros(len(SUMS))  # a tuner that was added since has no feedback
    observed = torch.stack([wrapped.observed.get(row, none).to(none) for row in rows_of(wrapped.groups)])
    wrapped.observed = None
    both = torch.cat([observed, grad_sq], -1)
    *columns, grad_sq = wrapped.sum_over_ranks(both).unbind(-1)
    return torch.stack(columns, -1), grad_sq


def tune(
    wrapped: Wrapped[Any],
    betas: Tensor,
    tuner: TunerState,
    sums: Tensor,
    finite: Tensor | None,
    held: list[Group] | None = None,
    *,
    again: bool = False,
) -> tuple[TunerState, Scaling]:
    """S becomes S', with the learning rates of the groups, or of what they held when the step began.

    ``finite``, [tuners], tells whose gradients the base may see. ``again`` if Deltas were rounded in this step before.
    """
    rates = tuners.read_rates(held or wrapped.groups, tuner.scales)
    tuned = update(tuner, sums, betas, wrapped.config, torch, rates)
    scales = total_scale(tuner, torch), total_scale(tuned, torch)
    retention = delta_retention(tuner, tuned, wrapped.config, torch, rates, scales)
    if retention is not None and is_on_host(retention) and bool((retention == 1).all()):
        retention = None
    count = _count(tuner)
    return tuned, Scaling(*scales, -1 - count if again else count, retention, finite)


def standing(tuner: TunerState, finite: Tensor | None = None) -> Scaling:
    """S stays as it is."""
    scale = total_scale(tuner, torch)
    return Scaling(scale, scale, _count(tuner), None, finite)


def _count(tuner: TunerState) -> Tensor:
    """The number of the step, [tuners]: every step has its own, finite or not."""
    count: Tensor = (tuner.steps + tuner.nonfinite_steps).unbind(-1)[0]
    return count
