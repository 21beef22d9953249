"""The order of one step: measure, tune, let the base step, scale what it did."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from mechanic.torch import gpu, tuners
from mechanic.torch.arrays import array_module
from mechanic.torch.buckets import Bucket, Scaling
from mechanic.torch.kernels.eager import is_on_host
from mechanic.torch.layout import params_of
from mechanic.torch.private import is_inside_backward
from mechanic.torch.shards import Reduction
from mechanic.torch.stored import noises_of, parts_of
from mechanic.torch.wrapped import Wrapped
from mechanic.tuner import SUMS, TunerState, delta_retention, total_scale, update


def step(wrapped: Wrapped[Any]) -> None:
    """Move the parameters from x_1 + S Delta to x_1 + S' Delta', where Delta' = k Delta + the base's update."""
    require_all_gradients(wrapped)
    wrapped.missing.check(wrapped.groups, wrapped.base.state)
    reduction, buckets = wrapped.reduction_and_buckets(wrapped.decays_beside_delta())
    if not buckets and reduction.group is None:
        return
    if gpu.takes(buckets, step_eagerly):
        gpu.step(wrapped, reduction, buckets, step_eagerly)
    else:
        step_eagerly(wrapped, reduction, buckets)


def step_eagerly(wrapped: Wrapped[Any], reduction: Reduction, buckets: list[Bucket]) -> None:
    """Step with PyTorch's own operators."""
    # Measure. This comes before the base steps, since it may edit gradients in place.
    betas, tuner = wrapped.read_tuners(buckets)
    sums, grad_sq = _measure(wrapped, reduction, buckets, tuner)
    xp = array_module(grad_sq.device)
    finite = xp.isfinite(grad_sq)  # [tuners]
    if wrapped.skip_nonfinite and not finite.all():
        wrapped.count_skipped_step()
        return
    if not wrapped.skip_nonfinite:
        for bucket in buckets:
            bucket.discard_grads_unless(finite)

    tuned, scaling = tune(wrapped, betas, tuner, sums)

    # Let the base step, and scale what it did.
    for bucket in buckets:
        bucket.scale_with(scaling)
    _step_and_move(wrapped, buckets)

    remember(wrapped, betas, tuned, finite)


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


def tune(
    wrapped: Wrapped[Any], betas: Tensor, tuner: TunerState, sums: Tensor, *, steps_again: bool = False
) -> tuple[TunerState, Scaling]:
    """S becomes S'. A stored Delta that was rounded in this step before ``steps_again``, with other random numbers."""
    xp = array_module(sums.device)
    rates = tuners.read_rates(wrapped.groups, like=tuner.scales)
    tuned = update(tuner, sums, betas, wrapped.config, xp, rates)
    scales = total_scale(tuner, torch), total_scale(tuned, torch)
    retention = _unless_one(delta_retention(tuner, tuned, wrapped.config, xp, rates, scales))
    return tuned, Scaling(*scales, retention, noises_of(wrapped.delta, tuner, again=steps_again))


def remember(wrapped: Wrapped[Any], betas: Tensor, tuned: TunerState, finite: Tensor) -> None:
    """Write down what a step has learned. ``finite``, [tuners], tells whose gradients were."""
    tuners.write_tuners(wrapped.groups, betas, tuned)
    tuners.remember_rates(wrapped.groups)
    wrapped.show_scales()
    wrapped.warn_if_nothing_is_learned(finite)
    wrapped.warn_of_scale(tuned)


def observe(wrapped: Wrapped[Any]) -> None:
    """Measure the gradients of a held-out batch for the next step."""
    buckets = wrapped.reduction_and_buckets()[1]
    if gpu.takes(buckets, step_eagerly):
        gpu.observe(wrapped, buckets)
        return
    tuner = wrapped.read_tuners(buckets)[1]
    sums = sum_by_tuner([(b.row, b.measure()) for b in buckets], len(SUMS), like=tuner.scales)
    wrapped.keep_observed(sums)


def switch_mode(wrapped: Wrapped[Any], switch: Any) -> None:
    """Let the base move its own iterates (``train()``, ``eval()``), and move the parameters by S times as much."""
    buckets = wrapped.reduction_and_buckets()[1]
    tuner = wrapped.read_tuners(buckets)[1]
    scale = total_scale(tuner, torch)
    for bucket in buckets:
        bucket.scale_with(Scaling(scale, scale, noises=noises_of(wrapped.delta, tuner)))
    for bucket, copies in zip(buckets, wrapped.step_base(buckets, instead=switch), strict=True):
        bucket.move(copies)


def _step_and_move(wrapped: Wrapped[Any], buckets: list[Bucket]) -> None:
    """Let the base step, and scale what it did; part by part where Deltas are decoded for it."""
    parts = parts_of(buckets)
    moved: list[Bucket] = []
    try:
        for part in parts:
            for bucket, stepped in zip(part, wrapped.step_base(part, only_these=len(parts) > 1), strict=True):
                bucket.move(stepped)
            moved += part
    except BaseException:
        for bucket in moved:
            bucket.move_back()
        raise


def sum_by_tuner(parts: list[tuple[int, Tensor]], width: int, like: Tensor) -> Tensor:
    """Add up parts that come with their tuner's row, [tuners, width]; with the dtype and device of ``like``."""
    sums = torch.zeros(len(like), width, dtype=like.dtype, device=like.device)
    rows = sums.unbind()
    for row, part in parts:
        rows[row].add_(part.to(like))
    return sums


def _measure(
    wrapped: Wrapped[Any], reduction: Reduction, buckets: list[Bucket], tuner: TunerState
) -> tuple[Tensor, Tensor]:
    """The five sums that tune, [tuners, 5], and |g|^2 of the gradients that the base steps with, [tuners].

    These differ if the sums were observed on other gradients. They share one collective.
    """
    observed = wrapped.take_observed(like=tuner.scales)
    if observed is None:
        sums = reduction.sum(sum_by_tuner([(b.row, b.measure()) for b in buckets], len(SUMS), like=tuner.scales))
        return sums, sums.unbind(-1)[SUMS.index("grad_sq")]
    grad_sq = sum_by_tuner([(b.row, b.grad_sq()) for b in buckets], 1, like=tuner.scales)
    *columns, grad_sq = reduction.sum(torch.cat([observed, grad_sq], -1)).unbind(-1)
    return torch.stack(columns, -1), grad_sq


def _unless_one(retention: Tensor | None) -> Tensor | None:
    """None if all of Delta is kept and that can be seen without waiting for a device: multiplying is saved then."""
    return None if retention is not None and is_on_host(retention) and bool((retention == 1).all()) else retention
