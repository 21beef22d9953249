"""The order of one step where the work is a few launches, whatever the number of tensors, groups and tuners.

Measure, tune, step: three launches if the kernels know the base's rule. Any other base steps by itself between two
more: ``lend`` prepares what it steps on, ``move`` scales what it did. The first step of a parameter is made this way in
any case, so that the base makes its own state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mechanic.torch import tuners
from mechanic.torch.buckets import Bucket, Scaling
from mechanic.torch.gpu import columns, launches
from mechanic.torch.gpu.rules import Rule, count_steps, numbers_around, numbers_of, rules_of
from mechanic.torch.gpu.table import Kind, Listed, Numbers, Table
from mechanic.torch.gpu.taken import Taken, are_alike, divide
from mechanic.torch.layout import Group
from mechanic.torch.private import mark_as_stepped
from mechanic.torch.shards import Reduction, locals_of
from mechanic.torch.wrapped import Wrapped
from mechanic.tuner import SUMS, delta_retention, total_scale, update

UNKNOWN_STEP = float("nan")  # it is counted on the device


@dataclass
class _Work:
    """One step's parameters, in the table."""

    taken: list[Taken]
    left: list[Bucket]  # for the eager kernels
    table: Table
    tuners: int
    rules: list[Rule] | None = None  # of every group, if the kernels know them all
    stepping: list[tuple[Group, list[Tensor]]] = field(default_factory=list)  # what they step, by group

    @property
    def buckets(self) -> list[Bucket]:
        return [*self.taken, *self.left]


def step(wrapped: Wrapped[Any], reduction: Reduction, buckets: list[Bucket]) -> None:
    """See :func:`mechanic.torch.step.step`."""
    work = _prepare(wrapped, buckets, observes=False)
    sums, grad_sq = _measure(wrapped, reduction, work)
    finite = grad_sq.isfinite()
    if wrapped.skip_nonfinite and not finite.all():
        wrapped.count_skipped_step()
        return
    tuned = _tune(wrapped, work, sums, finite)
    if work.rules is None:
        _step_around(wrapped, work, tuned, finite)
    else:
        _step_whole(wrapped, work, work.rules, tuned)
    for bucket in work.taken:
        for p in bucket.params if bucket.moves else ():
            torch.autograd.graph.increment_version(p)  # as any write does, so that a stale backward pass fails
    tuners.remember_rates(wrapped.groups)
    wrapped.warn_if_nothing_is_learned(finite)


def observe(wrapped: Wrapped[Any], buckets: list[Bucket]) -> None:
    """See :func:`mechanic.torch.step.observe`."""
    work = _prepare(wrapped, buckets, observes=True)
    sums = _local_sums(work)
    wrapped.observed = {row: sums[index] for row, index in tuners.rows_of(wrapped.groups).items()}


def _prepare(wrapped: Wrapped[Any], buckets: list[Bucket], *, observes: bool) -> _Work:
    device = buckets[0].device
    taken, left = divide(buckets, device)
    if not isinstance(wrapped.table, Table) or wrapped.table.device != device:
        wrapped.table = Table(device)
    work = _Work(taken, left, wrapped.table, len(tuners.rows_of(wrapped.groups)))
    listed = None
    if not (observes or wrapped.own_iterates or any(bucket.has_grad for bucket in left)):
        work.rules = rules_of(wrapped.base)
        listed = work.rules and _listed_whole(wrapped.base, work, work.rules)
    if listed is None:
        work.rules = None
        if not observes:
            for bucket in taken:
                bucket.make_room()
        listed = [_listed_around(bucket) for bucket in taken]
    wrapped.table.fill(listed, work.tuners)
    return work


def _listed_around(bucket: Taken) -> Listed:
    lists = bucket.lists()
    kind = Kind(bucket.dtype, lists[columns.G][0].dtype if columns.G in lists else bucket.dtype)
    count = len(bucket.params)
    numbers = numbers_around(bucket.sign, bucket.weight, bucket.decay)
    return Listed(kind, bucket.row, lists, [numbers] * count, [None] * count)


def _listed_whole(base: Any, work: _Work, rules: list[Rule]) -> list[Listed] | None:
    """All tensors with the base's own; None if a base has yet to make some, or they are not as expected."""
    use_of = {
        p: (index, group, rule)
        for index, (group, rule) in enumerate(zip(base.param_groups, rules, strict=True))
        for p in group["params"]
    }
    work.stepping = [(group, []) for group in base.param_groups]
    parts: dict[tuple[Any, ...], Listed] = {}
    known: dict[tuple[Any, ...], Numbers] = {}  # numbers, by what they depend on
    for bucket in work.taken:
        lists = bucket.lists()
        grad_dtype = lists[columns.G][0].dtype if bucket.has_grad else bucket.dtype
        for index, p in enumerate(bucket.params):
            of_group, group, rule = use_of[p]
            tensors = {column: tensors[index] for column, tensors in lists.items()}
            key: tuple[Any, ...] = (None, bucket.sign, bucket.weight)
            counter = None
            if bucket.has_grad:
                state = base.state.get(p, {})
                of_base = [state.get(name) for name in rule.state]
                counter = state.get("step") if rule.counts_steps else None
                if not _is_usable(tensors[columns.X], of_base, counter, rule, group, sharded=bucket.sharded):
                    return None
                tensors.update(zip((columns.M, columns.V), locals_of(of_base, sharded=bucket.sharded), strict=False))
                work.stepping[of_group][1].append(p)
                key = (of_group, bucket.sign, bucket.weight, *_progress(state, counter, rule, bucket.device))
                if counter is not None and _is_on_device(counter, bucket.device, rule):
                    tensors[columns.STEP] = counter
            if key not in known:
                known[key] = (
                    numbers_of(rule, group, *key[1:])
                    if bucket.has_grad
                    else numbers_around(bucket.sign, bucket.weight, 0.0)
                )
            kind = Kind(bucket.dtype, grad_dtype, rule.number, len(rule.state), columns.STEP in tensors)
            part = parts.setdefault((kind, bucket.row, tuple(tensors)), _empty(kind, bucket.row, tensors))
            for column, tensor in tensors.items():
                part.lists[column].append(tensor)
            part.numbers.append(known[key])
            lr = group["lr"]
            part.rates.append(lr if isinstance(lr, Tensor) and bucket.has_grad else None)
    return list(parts.values())


def _empty(kind: Kind, tuner: int, tensors: dict[int, Tensor]) -> Listed:
    return Listed(kind, tuner, {column: [] for column in tensors}, [], [])


def _is_usable(
    x: Tensor, of_base: list[Tensor | None], counter: Any, rule: Rule, group: Group, *, sharded: bool
) -> bool:
    """Whether the kernels can work on a base's state as it is."""
    if any(tensor is None for tensor in of_base) or (rule.counts_steps and not isinstance(counter, Tensor)):
        return False
    present = locals_of([tensor for tensor in of_base if tensor is not None], sharded=sharded)
    if any(tensor.dtype != torch.float32 or tensor.device != x.device for tensor in present):
        return False
    lr = group["lr"]
    if isinstance(lr, Tensor) and (lr.device != x.device or lr.dtype != torch.float32):
        return False
    if counter is not None and counter.device.type != "cpu" and rule.number in (columns.NADAM, columns.ADAM):
        on_device = rule.number == columns.ADAM and counter.device == x.device and counter.dtype == torch.float32
        if not on_device:
            return False
    return are_alike((x, *present))


def _is_on_device(counter: Tensor, device: torch.device, rule: Rule) -> bool:
    """Whether the kernels are to read a step counter: reading it here would wait for the device."""
    return rule.number == columns.ADAM and counter.device == device and device.type != "cpu"


def _progress(state: Any, counter: Tensor | None, rule: Rule, device: torch.device) -> tuple[float, float]:
    """The number of the step that is about to be made, and NAdam's mu_product before it."""
    if rule.number not in (columns.ADAM, columns.NADAM) or counter is None:
        return 0.0, 1.0
    if _is_on_device(counter, device, rule):
        return UNKNOWN_STEP, 1.0
    step = counter.item() + 1
    return step, float(state["mu_product"]) if rule.number == columns.NADAM else 1.0


def _local_sums(work: _Work) -> Tensor:
    """The five sums of what this rank holds, [tuners, 5]."""
    parts = launches.five_sums(work.table)
    sums = torch.zeros(work.tuners, len(SUMS), dtype=torch.float64, device=work.table.device)
    for span in work.table.spans:
        for tuner, (first, last) in enumerate(span.of_tuner):
            sums[tuner] += parts[first:last].sum(0)
    for bucket in work.left:
        sums[bucket.row] += bucket.measure().to(sums)
    return sums


def _measure(wrapped: Wrapped[Any], reduction: Reduction, work: _Work) -> tuple[Tensor, Tensor]:
    """The five sums that tune, [tuners, 5], and |g|^2 of the gradients that the base steps with, [tuners]."""
    observed, wrapped.observed = wrapped.observed, None
    sums = _local_sums(work)
    if observed is None:
        sums = reduction.sum(sums)
        return sums, sums.unbind(-1)[SUMS.index("grad_sq")]
    none = sums.new_zeros(len(SUMS))
    known = torch.stack([observed.get(row, none).to(none) for row in tuners.rows_of(wrapped.groups)])
    grad_sq = sums[:, SUMS.index("grad_sq")].unsqueeze(-1)
    *of_observed, grad_sq = reduction.sum(torch.cat([known, grad_sq], -1)).unbind(-1)
    return torch.stack(of_observed, -1), grad_sq


def _tune(wrapped: Wrapped[Any], work: _Work, sums: Tensor, finite: Tensor) -> Tensor:
    """S becomes S'. Returns what the other kernels need to know, [tuners, TUNED]."""
    betas, before = tuners.read_tuners(wrapped.groups, work.table.device)
    rates = tuners.read_rates(wrapped.groups, like=before.scales)
    after = update(before, sums, betas, wrapped.config, torch, rates)
    retention = delta_retention(before, after, wrapped.config, torch)
    tuners.write_tuners(wrapped.groups, betas, after)
    wrapped.show_scales()
    old, new = total_scale(before, torch), total_scale(after, torch)
    kept = torch.ones_like(old) if retention is None else retention
    return torch.stack([old / kept, new - old / kept, kept, finite.to(old), old, new], -1)


def _step_whole(wrapped: Wrapped[Any], work: _Work, rules: list[Rule], tuned: Tensor) -> None:
    """The base's step and Mechanic's in one launch."""
    count_steps(wrapped.base, work.stepping, rules)
    launches.step(work.table, tuned)
    for bucket in work.taken:
        if bucket.has_grad:
            for p, kept in zip(bucket.params, bucket.mechanic_state, strict=True):
                wrapped.base.state[p].update(kept)
    _move_left(work.left, tuned, [[] for _ in work.left])
    mark_as_stepped(wrapped.base)


def _step_around(wrapped: Wrapped[Any], work: _Work, tuned: Tensor, finite: Tensor) -> None:
    """Launches before and after the base's own step."""
    way = {"lends_delta": any(bucket.steps_on_delta for bucket in work.buckets), "offset": wrapped.own_iterates}
    scaling = _scaling(tuned)
    for bucket in work.buckets:
        bucket.scale_with(scaling)
    for bucket in work.left:
        bucket.discard_grads_unless(finite)
    launches.lend(work.table, tuned, **way)
    stepped = wrapped.step_base(work.buckets)
    for bucket, of_bucket in zip(work.buckets, stepped, strict=True):
        bucket.move(of_bucket)
    launches.move(work.table, tuned, **way)


def _move_left(left: list[Bucket], tuned: Tensor, stepped: list[list[Tensor]]) -> None:
    for bucket, of_bucket in zip(left, stepped, strict=True):
        bucket.scale_with(_scaling(tuned))
        bucket.move(of_bucket)


def _scaling(tuned: Tensor) -> Scaling:
    of_columns = tuned.unbind(-1)
    return Scaling(of_columns[columns.BEFORE], of_columns[columns.AFTER], of_columns[columns.RETENTION])


