"""What a step puts into the table: the tensors with the base's own or around the base, and the tuners."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mechanic.config import TunerConfig
from mechanic.torch import tuners
from mechanic.torch.gpu import columns
from mechanic.torch.gpu.rules import Rule, is_on_device, numbers_around, numbers_of
from mechanic.torch.gpu.table import Kind, Listed, Numbers, Span, bits
from mechanic.torch.gpu.taken import Taken, are_alike
from mechanic.torch.layout import PEAK_LR, ROW, TUNER, Group
from mechanic.torch.shards import locals_of

Rate = float | Tensor | None
"""A learning rate: a number, a 0-dim float32 tensor on the device of the table, or none."""

UNKNOWN_STEP = math.nan  # it is counted on the device


def rates_of(groups: list[Group], device: torch.device) -> list[Rate]:
    """The learning rates of the groups. Reads no tensor that is on a device."""
    rates: list[Rate] = []
    for group in groups:
        lr = group.get("lr")
        if isinstance(lr, Tensor) and (lr.device == device or lr.device.type != "cpu"):
            rates.append(lr.to(device, torch.float32))
        else:
            rates.append(None if lr is None else float(lr))
    return rates


def list_around(bucket: Taken) -> Listed:
    """A bucket for a base that steps by itself."""
    lists = bucket.lists()
    grad_dtype = lists[columns.G][0].dtype if columns.G in lists else bucket.dtype
    kind = Kind(bucket.dtype, grad_dtype, delta_dtype=bucket.stored_in)
    count = len(bucket.params)
    numbers = numbers_around(bucket.sign, bucket.weight, bucket.decay)
    return Listed(kind, bucket.row, lists, [numbers] * count, [None] * count, bucket.numbers)


def list_whole(base: Any, buckets: Sequence[Taken], rules: list[Rule], rates: list[Rate]) -> list[Listed] | None:
    """All tensors with the base's own; None if the base has yet to make some, or the kernels cannot work on them."""
    use_of = {p: index for index, group in enumerate(base.param_groups) for p in group["params"]}
    parts: dict[tuple[Any, ...], Listed] = {}
    known: dict[tuple[Any, ...], Numbers] = {}  # by what they depend on
    for bucket in buckets:
        lists = bucket.lists()
        grad_dtype = lists[columns.G][0].dtype if bucket.has_grad else bucket.dtype
        for index, p in enumerate(bucket.params):
            use = use_of[p]
            group, rule, rate = base.param_groups[use], rules[use], rates[use]
            tensors = {column: tensors[index] for column, tensors in lists.items()}
            progress: tuple[float, ...] = ()
            if bucket.has_grad:
                state = base.state.get(p, {})
                of_base = _of_base(tensors[columns.X], state, rule, bucket.base_dtype, sharded=bucket.sharded)
                if of_base is None:
                    return None
                tensors.update(of_base)
                progress = _progress(state, rule, columns.STEP in of_base)
            key = use, bucket.sign, bucket.weight, *progress
            if key not in known:
                known[key] = _numbers(rule, group, rate, bucket, progress)
            of_rule = rule.number, len(rule.state), columns.STEP in tensors
            kind = Kind(bucket.dtype, grad_dtype, *of_rule, bucket.stored_in, bucket.base_dtype)
            part = parts.setdefault(
                (kind, bucket.row, *tensors), Listed(kind, bucket.row, {column: [] for column in tensors}, [], [], [])
            )
            for column, tensor in tensors.items():
                part.lists[column].append(tensor)
            part.numbers.append(known[key])
            part.rates.append(rate if isinstance(rate, Tensor) else None)
            part.places.append(bucket.numbers[index])
    return list(parts.values())


def _of_base(x: Tensor, state: Any, rule: Rule, dtype: torch.dtype, *, sharded: bool) -> dict[int, Tensor] | None:
    """What the base keeps of a parameter, by column; None if the kernels cannot work on it as it is."""
    counter = state.get("step")
    if any(name not in state for name in rule.state) or (rule.counts_steps and not isinstance(counter, Tensor)):
        return None
    kept = locals_of([state[name] for name in rule.state], sharded=sharded)
    fits = all(tensor.dtype == dtype and tensor.device == x.device for tensor in kept)
    if not (fits and are_alike((x, *kept))):
        return None
    of_base = dict(zip((columns.M, columns.V), kept, strict=False))
    if rule.counts_steps and is_on_device(counter):
        if rule.number == columns.ADAM and counter.device == x.device and counter.dtype == torch.float32:
            of_base[columns.STEP] = counter
        elif rule.number in (columns.ADAM, columns.NADAM):  # the rule depends on it, and the kernels cannot read it
            return None
    return of_base


def _progress(state: Any, rule: Rule, counted_on_device: bool) -> tuple[float, float]:
    """The number of the step that is about to be made, and NAdam's mu_product before it."""
    if counted_on_device:
        return UNKNOWN_STEP, 1.0
    if rule.number == columns.NADAM:
        return state["step"].item() + 1, state["mu_product"].item()
    return (state["step"].item() + 1 if rule.number == columns.ADAM else 0.0), 1.0


def _numbers(rule: Rule, group: Group, rate: Rate, bucket: Taken, progress: tuple[float, ...]) -> Numbers:
    if not progress:  # without a gradient
        return numbers_around(bucket.sign, bucket.weight, 0.0)
    share = (rate if isinstance(rate, float) else 1.0) / float(group[PEAK_LR])
    step, mu_product = progress
    return numbers_of(rule, group, share, bucket.sign, bucket.weight, step, mu_product)


def words_of_tuners(
    config: TunerConfig, groups: list[Group], rates: list[Rate], spans: list[Span], *, show: bool
) -> Iterator[int]:
    """What `tune` needs: the config, which groups and programs belong to each tuner, and the groups."""
    pulls = config.decay, config.late_decay
    yield from map(bits, (config.s_init, *pulls, config.eps, config.forgetting, config.min_lr, config.max_lr))
    order = sorted(range(len(groups)), key=lambda index: groups[index][ROW])
    rows = [groups[index][ROW] for index in order]
    for tuner, row in enumerate(tuners.rows_of(groups)):
        first = rows.index(row)
        yield from (first, first + rows.count(row))
        for span in spans:
            yield from span.of_tuner[tuner]
    for index in order:
        group, rate = groups[index], rates[index]
        known = any(other is not None for other, of in zip(rates, groups, strict=True) if of[ROW] == group[ROW])
        number = rate if isinstance(rate, float) else (-math.inf if known else 1.0)
        yield group[TUNER].data_ptr()
        yield group["d"].data_ptr() if show else 0
        yield rate.data_ptr() if isinstance(rate, Tensor) else 0
        yield bits(number)
        yield bits(float(group[PEAK_LR]))
