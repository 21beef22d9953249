"""The order of one step where the work is a few launches, whatever the number of tensors, groups and tuners.

Measure, tune, step: three launches if the kernels know the base's rule. Any other base steps by itself between two
more: ``lend`` prepares what it steps on, ``move`` scales what it did. The first step of a parameter is made this way in
any case, so that the base makes its own state. Of stored Deltas, such steps are left to the eager kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mechanic.torch import capture, tuners
from mechanic.torch.buckets import Bucket, Scaling
from mechanic.torch.gpu import columns, launches
from mechanic.torch.gpu.listing import Rate, list_around, list_whole, rates_of, words_of_tuners
from mechanic.torch.gpu.rules import Rule, count_steps, rules_of
from mechanic.torch.gpu.table import Span, Table
from mechanic.torch.gpu.taken import Taken, divide
from mechanic.torch.kernels.storage import Noises
from mechanic.torch.layout import ROW, TUNER
from mechanic.torch.private import mark_as_stepped
from mechanic.torch.shards import Reduction
from mechanic.torch.stored import StoredBucket
from mechanic.torch.wrapped import Wrapped
from mechanic.tuner import SUMS

_STEPS_BY_ITSELF = (
    "the base steps by itself, on copies that are elsewhere in every step. MECHANIC_KERNELS=eager in the environment "
    "turns off the kernels that have to know where they are"
)
_TENSORS_HAVE_MOVED = (
    "tensors are elsewhere than in the step before, and a graph cannot be told where. Keep gradients in their place, "
    "zero_grad(set_to_none=False), have learning rates in float32, and make three steps before the capture"
)


@dataclass
class _Work:
    """One step's parameters, in the table."""

    taken: Sequence[Taken]
    left: Sequence[Bucket]  # for the eager kernels
    table: Table
    tuners: int
    rates: list[Rate]  # by group; kept, since the table has their addresses
    rules: list[Rule] | None = None  # by group, if the kernels make the base's step as well

    @property
    def buckets(self) -> list[Bucket]:
        return [*self.taken, *self.left]


def step(wrapped: Wrapped[Any], reduction: Reduction, buckets: list[Bucket], eager: Callable[..., None]) -> None:
    """See :func:`mechanic.torch.step.step`. The kernels do not lend stored Deltas to a base: ``eager`` does it then."""
    work = _prepare(wrapped, buckets, steps=True)
    if work is None:
        eager(wrapped, reduction, buckets)
        return
    summed = parts = None
    if wrapped.skip_nonfinite or wrapped.observed is not None or work.left or reduction.group is not None:
        summed = _measure(wrapped, reduction, work)  # something has to be done with the sums before they tune
        if wrapped.skip_nonfinite and not summed[1].isfinite().all():
            wrapped.count_skipped_step()
            return
    else:
        parts = launches.five_sums(work.table)
    tuned, unchanged = launches.tune(work.table, parts, summed, work.tuners, wrapped.config)
    if work.rules is None:
        _step_around(wrapped, work, tuned, unchanged)
    else:
        _step_whole(wrapped, work, work.rules, tuned)
    for bucket in work.taken:
        for x in bucket.lists()[columns.X] if bucket.moves else ():
            torch.autograd.graph.increment_version(x)  # as any write does, so that a stale backward pass fails
    tuners.remember_rates(wrapped.groups)
    wrapped.warn_if_nothing_is_learned(tuned.unbind(-1)[columns.FINITE])


def observe(wrapped: Wrapped[Any], buckets: list[Bucket]) -> None:
    """See :func:`mechanic.torch.step.observe`."""
    work = _prepare(wrapped, buckets, steps=False)
    assert work is not None, "nothing is lent"
    wrapped.keep_observed(_local_sums(work))


def _prepare(wrapped: Wrapped[Any], buckets: list[Bucket], *, steps: bool) -> _Work | None:
    """None if the base has to step by itself, and Deltas are stored."""
    device, groups = buckets[0].device, wrapped.groups
    is_captured = capture.is_capturing(groups)
    taken, left = divide(buckets, device)
    if not isinstance(wrapped.table, Table) or wrapped.table.device != device:
        wrapped.table = Table(device)
    work = _Work(taken, left, wrapped.table, len(tuners.rows_of(groups)), rates_of(groups, device))
    listed = None
    if steps and not (wrapped.own_iterates or any(bucket.has_grad for bucket in left)):
        work.rules = rules_of(wrapped.base)
        listed = None if work.rules is None else list_whole(wrapped.base, taken, work.rules, work.rates)
    if listed is None:
        if steps and any(isinstance(bucket, StoredBucket) for bucket in buckets):
            return None
        if is_captured:
            capture.refuse(_STEPS_BY_ITSELF)
        work.rules = None
        for bucket in taken if steps else ():
            bucket.make_room()
        listed = [list_around(bucket) for bucket in taken]
    tuners.bring(groups, device)
    show = wrapped.shows_scales
    if show:
        tuners.make_shown(groups)

    def rest(spans: list[Span]) -> Iterator[int]:
        return words_of_tuners(wrapped.config, groups, work.rates, spans, show=show)

    if not is_captured:
        wrapped.table.fill(listed, work.tuners, rest)
    elif not wrapped.table.fill_and_hold(listed, work.tuners, rest):
        capture.refuse(_TENSORS_HAVE_MOVED)
    return work


def _local_sums(work: _Work) -> Tensor:
    """The five sums of what this rank holds, [tuners, 5]."""
    sums = launches.add(work.table, launches.five_sums(work.table), work.tuners)
    for bucket in work.left:
        sums[bucket.row] += bucket.measure().to(sums)
    return sums


def _measure(wrapped: Wrapped[Any], reduction: Reduction, work: _Work) -> tuple[Tensor, Tensor]:
    """The five sums that tune, [tuners, 5], and |g|^2 of the gradients that the base steps with, [tuners]."""
    sums = _local_sums(work)
    observed = wrapped.take_observed(like=sums)
    if observed is None:
        sums = reduction.sum(sums)
        return sums, sums.unbind(-1)[SUMS.index("grad_sq")].contiguous()
    grad_sq = sums[:, SUMS.index("grad_sq")].unsqueeze(-1)
    *of_observed, grad_sq = reduction.sum(torch.cat([observed, grad_sq], -1)).unbind(-1)
    return torch.stack(of_observed, -1), grad_sq.contiguous()


def _step_whole(wrapped: Wrapped[Any], work: _Work, rules: list[Rule], tuned: Tensor) -> None:
    """The base's step and Mechanic's in one launch."""
    state = wrapped.base.state
    launches.step(work.table, tuned)
    stepped = set()
    for bucket in work.taken:
        if bucket.has_grad:
            stepped.update(bucket.params)
            for p, kept in zip(bucket.params, bucket.mechanic_state, strict=True):
                state[p].update(kept)
    for other in work.left:
        other.scale_with(_scaling(tuned))
        other.move([])
    for group, rule in zip(wrapped.groups, rules, strict=True):
        count_steps(rule, group, [state[p] for p in group["params"] if p in stepped])
    mark_as_stepped(wrapped.base)


def _step_around(wrapped: Wrapped[Any], work: _Work, tuned: Tensor, unchanged: Tensor) -> None:
    """Launches before and after the base's own step. If that fails, the tuners go back to what they were."""
    way = {"lends_delta": any(bucket.steps_on_delta for bucket in work.buckets), "offset": wrapped.own_iterates}
    scaling = _scaling(tuned)
    for bucket in work.buckets:
        bucket.scale_with(scaling)
    for bucket in work.left:
        bucket.discard_grads_unless(tuned.unbind(-1)[columns.FINITE] != 0)
    launches.lend(work.table, tuned, **way)
    try:
        stepped = wrapped.step_base(work.buckets)
    except BaseException:
        index = tuners.rows_of(wrapped.groups)
        for group in wrapped.groups:
            group[TUNER].copy_(unchanged[index[group[ROW]]])
        wrapped.show_scales()
        raise
    for bucket, of_bucket in zip(work.buckets, stepped, strict=True):
        bucket.move(of_bucket)
    launches.move(work.table, tuned, **way)


def _scaling(tuned: Tensor) -> Scaling:
    of_columns = tuned.unbind(-1)
    scales = of_columns[columns.BEFORE], of_columns[columns.AFTER], of_columns[columns.RETENTION]
    return Scaling(*scales, Noises(of_columns[columns.STEPS]))
