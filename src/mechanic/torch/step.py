"""The order of one step: measure, tune, let the base step on copies, and move the parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mechanic.torch.base import View, has_method, starts_of, steps_one_by_one
from mechanic.torch.buckets import Bucket, Member, kept_of, parts_of, prepare
from mechanic.torch.layout import DELTA, ROW, Group, read_rates, read_tuners, rows_of
from mechanic.torch.lists import FactorsOf, factors_of_step, is_on_host
from mechanic.torch.wrapped import Wrapped
from mechanic.tuner import SUMS, TunerState, delta_retention, total_scale, update


def step(wrapped: Wrapped[Any]) -> None:
    """Move the parameters from x_1 + S Delta to x_1 + S' Delta', where Delta' = k Delta + the base's update.

    If S is frozen, they move by S times the base's update.
    """
    wrapped.check_parameters()
    buckets, betas, tuner = trained(wrapped)
    wrapped.warn_if_nothing_is_trained(any(bucket.moves for bucket in buckets))
    if wrapped.skip_nonfinite or not wrapped.is_frozen:
        sums, finite = _measure(wrapped, buckets, tuner)  # before the base steps: it may edit gradients
        if wrapped.skip_nonfinite and not finite.all():
            wrapped.count_skipped_step()
            return
    if wrapped.is_frozen:
        learned, factors_of = None, standing(tuner)
    else:
        tuned, factors_of = tune(wrapped, betas, tuner, sums, finite)
        learned = betas, tuned
    wrapped.run_hooks(after=False)
    move(wrapped, View(wrapped.base), buckets, factors_of, begin=partial(wrapped.remember, learned))
    wrapped.run_hooks(after=True)


def move(
    wrapped: Wrapped[Any],
    view: View,
    buckets: list[Bucket],
    factors_of: FactorsOf,
    *,
    method: str = "step",
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Let the base step on copies, part by part, or call its ``train`` or ``eval``, and move the parameters.

    ``begin`` is called before the first parameter moves. If the base raises, or something from outside does, every
    parameter is where it was before its move or after it.
    """
    has_moved = False
    try:
        for part in parts_of(buckets, one_by_one=steps_one_by_one(wrapped.base)):
            _move_part(wrapped.base.state, view, part, factors_of, method, (lambda: None) if has_moved else begin)
            has_moved = True
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            some = "some parameters have made their step" if has_moved else "no parameter has moved"
            error.add_note(
                f"Mechanic: the step failed: {some}. Some of the base's own state may have changed. "
                "Training can go on; to repeat the step exactly, load a checkpoint."
            )
        raise


def _move_part(
    state: Any, view: View, part: list[Bucket], factors_of: FactorsOf, method: str, begin: Callable[[], None]
) -> None:
    switches = method != "step"
    lent = [b.lent(factors_of) if b.has_grad or (switches and b.moves) else {} for b in part]
    seen = {p: tensor for own in lent for p, tensor in own.items()}
    if seen or switches:
        view.act(seen, method)
    for tensor in seen.values():
        tensor.grad = None  # of another dtype it is a copy, which is not needed any more
    begin()
    for bucket, own in zip(part, lent, strict=True):
        bucket.move(state, own, factors_of)


def switch_mode(wrapped: Wrapped[Any], mode: str) -> None:
    """Let the base move its own iterates (``train()``, ``eval()``), and move the parameters by S times as much."""
    if has_method(wrapped.base, mode):
        wrapped.require_assigned_groups()
        buckets, _, tuner = trained(wrapped)
        move(wrapped, View(wrapped.base), buckets, standing(tuner), method=mode)


def observe(wrapped: Wrapped[Any]) -> None:
    """Measure the gradients of a held-out batch for the next step."""
    buckets, _, tuner = trained(wrapped)
    sums = wrapped.reduction().mean_over_copies(sums_of(buckets, tuner))
    wrapped.observed = dict(zip(rows_of(wrapped.groups), sums.unbind(), strict=True))


def trained(
    wrapped: Wrapped[Any], chosen: Collection[Tensor] | None = None, held: list[Group] | None = None
) -> tuple[list[Bucket], Tensor, TunerState]:
    """The parameters that are trained, or some of them, in lists; the betas and all tuners, where the first one is.

    ``held`` is what the groups held before.
    """
    groups = held or wrapped.groups
    start_of = starts_of(wrapped.base, groups, wrapped.delta, own_iterates=wrapped.own_iterates)
    rows, weight = rows_of(groups), wrapped.reduction().weight
    members: dict[tuple[Any, ...], list[Member]] = {}
    number = -1  # of the parameter among those that are trained
    for index, group in enumerate(groups):
        for p in group["params"]:
            number += p.requires_grad
            if not p.requires_grad or (chosen is not None and p not in chosen):
                continue
            entry = wrapped.base.state.get(p, {})
            shard = prepare(p, entry)
            # A parameter that never had a gradient has no state. It has not moved, and will not move now.
            has_grad, moves = p.grad is not None, p.grad is not None or DELTA in entry
            key = (rows[group[ROW]], weight(p), p.device, p.dtype, has_grad, moves, start_of(index, p.dtype))
            kept = kept_of(p, entry, wrapped.delta, is_frozen=wrapped.is_frozen) if moves else {}
            members.setdefault(key, []).append(Member(p, kept, number + shard))
    buckets = [Bucket(found, *key) for key, found in members.items()]
    return buckets, *read_tuners(wrapped.groups, buckets[0].device if buckets else None)


def sums_of(buckets: list[Bucket], tuner: TunerState, *, of_grads: bool = False) -> Tensor:
    """The five sums of this rank, [tuners, 5]; or only |g|^2, and zeros."""
    sums = torch.zeros(len(tuner.scales), len(SUMS), dtype=tuner.scales.dtype, device=tuner.scales.device)
    rows = sums.unbind()
    for bucket in buckets:
        if bucket.has_grad or not of_grads:
            rows[bucket.row].add_(bucket.sums(sums.dtype, of_grads=of_grads).to(sums))
    return sums


def are_finite(sums: Tensor) -> Tensor:
    """Whether the gradients of every tuner are, [tuners]."""
    return sums.unbind(-1)[SUMS.index("grad_sq")] < torch.inf  # false of NaN


def _measure(wrapped: Wrapped[Any], buckets: list[Bucket], tuner: TunerState) -> tuple[Tensor, Tensor]:
    """The five sums that tune, [tuners, 5], and whether the gradients that the base steps with are finite, [tuners].

    If the sums were observed on other gradients, both share one collective.
    """
    of_grads = wrapped.is_frozen or wrapped.observed is not None
    sums = sums_of(buckets, tuner, of_grads=of_grads)
    if wrapped.observed is None:
        sums = wrapped.sum_over_ranks(sums)
        return sums, are_finite(sums)
    none = sums.new_zeros(len(SUMS))  # a tuner that was added since has no feedback
    observed = torch.stack([wrapped.observed.get(row, none).to(none) for row in rows_of(wrapped.groups)])
    wrapped.observed = None
    observed, sums = wrapped.sum_over_ranks(torch.stack([observed, sums])).unbind()
    return observed, are_finite(sums)


def tune(
    wrapped: Wrapped[Any],
    betas: Tensor,
    tuner: TunerState,
    sums: Tensor,
    finite: Tensor | None = None,
    held: list[Group] | None = None,
) -> tuple[TunerState, FactorsOf]:
    """S becomes S'. ``finite``, [tuners], tells whose gradients the base may see.

    ``held`` is what the groups held when the step began.
    """
    rates = read_rates(held or wrapped.groups, tuner.scales)
    tuned = update(tuner, sums, betas, wrapped.config, torch, rates)
    scales = total_scale(tuner, torch), total_scale(tuned, torch)
    retention = delta_retention(tuner, tuned, wrapped.config, torch, rates, scales)
    if retention is not None and is_on_host(retention) and bool((retention == 1).all()):
        retention = None
    return tuned, factors_of_step(*scales, tuner.steps + tuner.nonfinite_steps, retention, finite)


def standing(tuner: TunerState, finite: Tensor | None = None) -> FactorsOf:
    """S stays as it is."""
    scale = total_scale(tuner, torch)
    return factors_of_step(scale, scale, tuner.steps + tuner.nonfinite_steps, None, finite)
