"""The tuner as a kernel: one program per tuner does in float64 what :mod:`mechanic.tuner` does in arrays.

The names, and the order of the lines, are those of that module. Whoever changes one changes the other;
``tests/torch/triton`` compares them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic import tuner as _tuner
from mechanic.torch.gpu import columns
from mechanic.torch.gpu.programs import (
    AFTER,
    BEFORE,
    CHANGE,
    FINITE,
    RECORD,
    RETENTION,
    SCALE,
    STEP,
    STEPS,
    TUNED,
    _number,
)

FINDING_STEPS = tl.constexpr(_tuner.FINDING_STEPS)
ZERO_START_NORM = tl.constexpr(_tuner.ZERO_START_NORM)
STAKE_GROWTH = tl.constexpr(_tuner.STAKE_GROWTH)
LARGEST_STAKE = tl.constexpr(_tuner.LARGEST_STAKE)
ENOUGH_WON = tl.constexpr(_tuner.ENOUGH_WON)
SMALL_GRADIENT = tl.constexpr(_tuner.SMALL_GRADIENT)
TINY_GRADIENT = tl.constexpr(_tuner.TINY_GRADIENT)
GRADIENT_JUMP = tl.constexpr(_tuner.GRADIENT_JUMP)
CALM_AFTER = tl.constexpr(_tuner.CALM_AFTER)
CALM_UNTIL = tl.constexpr(_tuner.CALM_UNTIL)
TINY = tl.constexpr(_tuner.TINY)
INFINITY = tl.constexpr(float("inf"))
S_INIT = tl.constexpr(columns.S_INIT)
CONFIG_DECAY = tl.constexpr(columns.CONFIG_DECAY)
LATE_DECAY = tl.constexpr(columns.LATE_DECAY)
EPS = tl.constexpr(columns.EPS)
FORGETTING = tl.constexpr(columns.FORGETTING)
MIN_LR = tl.constexpr(columns.MIN_LR)
MAX_LR = tl.constexpr(columns.MAX_LR)
CONFIG = tl.constexpr(columns.CONFIG)
TUNER_AT = tl.constexpr(columns.TUNER_AT)
SHOWN_AT = tl.constexpr(columns.SHOWN_AT)
RATE_AT = tl.constexpr(columns.RATE_AT)
RATE = tl.constexpr(columns.RATE)
PEAK = tl.constexpr(columns.PEAK)
GROUP = tl.constexpr(columns.GROUP)
TUNER_ROWS = tl.constexpr(columns.TUNER_ROWS)


@triton.jit
def _added(parts, spans_at, spans, RED: tl.constexpr):
    """The five sums of one tuner."""
    lane = tl.arange(0, RED)
    s0 = tl.zeros([RED], tl.float64)
    s1, s2, s3, s4 = s0, s0, s0, s0
    for span in range(spans):
        first = tl.load(spans_at + 2 * span)
        last = tl.load(spans_at + 2 * span + 1)
        for o in range(first, last, RED):
            row = parts + (o + lane) * 5
            mask = o + lane < last
            s0 += tl.load(row, mask, 0.0)
            s1 += tl.load(row + 1, mask, 0.0)
            s2 += tl.load(row + 2, mask, 0.0)
            s3 += tl.load(row + 3, mask, 0.0)
            s4 += tl.load(row + 4, mask, 0.0)
    return tl.sum(s0, 0), tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0), tl.sum(s4, 0)


@triton.jit
def _tuner_record(words, rest, tuner, spans):
    """Its first group, the one after its last, and its spans of programs."""
    return words + rest + CONFIG + tuner * (2 + 2 * spans)


@triton.jit(do_not_specialize=["rest", "spans"])
def add(words, parts, sums, rest, spans, RED: tl.constexpr):
    """The five sums by tuner, [tuners, 5], where something has to be done with them before they tune."""
    tuner = tl.program_id(0)
    s0, s1, s2, s3, s4 = _added(parts, _tuner_record(words, rest, tuner, spans) + 2, spans, RED)
    tl.store(sums + 5 * tuner, s0)
    tl.store(sums + 5 * tuner + 1, s1)
    tl.store(sums + 5 * tuner + 2, s2)
    tl.store(sums + 5 * tuner + 3, s3)
    tl.store(sums + 5 * tuner + 4, s4)


@triton.jit
def _hypot(a, b):
    """Without squares that leave the range."""
    a, b = tl.abs(a), tl.abs(b)
    larger, smaller = tl.maximum(a, b), tl.minimum(a, b)
    ratio = smaller / tl.where(larger > 0, larger, 1.0)
    return larger * tl.sqrt(1 + ratio * ratio)


@triton.jit
def _is_finite(a):
    return tl.abs(a) < INFINITY


@triton.jit
def _pace(rate, largest_rate):
    return tl.minimum(tl.maximum(rate / tl.maximum(largest_rate, TINY), 0.0), 1.0)


@triton.jit(do_not_specialize=["T", "rest", "spans"])
def tune(
    words, parts, sums, grad_sqs, tuned, unchanged, T, rest, spans, N: tl.constexpr, P: tl.constexpr, RED: tl.constexpr,
    ADDS: tl.constexpr, RELATIVE_START: tl.constexpr, GUARD: tl.constexpr, SETTLE: tl.constexpr,
    FORGETS: tl.constexpr, BOUNDS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """One step of every tuner, written to all groups that share it; what it was before; and what others need of it.

    ADDS: the sums are still in ``parts``, and the gradients that tune are those that the base steps with. COUNTS: the
    base counts its steps on the device, and so one is added to them here.
    """
    tuner = tl.program_id(0)
    config = words + rest
    mine = _tuner_record(words, rest, tuner, spans)
    groups = _tuner_record(words, rest, tl.num_programs(0), spans)
    first_group, last_group = tl.load(mine), tl.load(mine + 1)
    if ADDS:
        delta_grad, delta_param, grad_sq, param_sq, delta_sq = _added(parts, mine + 2, spans, RED)
        stepped_grad_sq = grad_sq
    else:
        delta_grad, delta_param = tl.load(sums + 5 * tuner), tl.load(sums + 5 * tuner + 1)
        grad_sq, param_sq = tl.load(sums + 5 * tuner + 2), tl.load(sums + 5 * tuner + 3)
        delta_sq = tl.load(sums + 5 * tuner + 4)
        stepped_grad_sq = tl.load(grad_sqs + tuner)
    decay, late_decay, eps = _number(config, CONFIG_DECAY), _number(config, LATE_DECAY), _number(config, EPS)
    config_s_init, forgetting = _number(config, S_INIT), _number(config, FORGETTING)

    # The state, [P]: the first N lanes are in use, all others 0.
    i = tl.arange(0, P)
    used = i < N
    own = tl.load(groups + first_group * GROUP + TUNER_AT).to(tl.pointer_type(tl.float64)) + i
    betas = tl.load(own, used, 0.0)
    old_largest_feedback = tl.load(own + N, used, 0.0)
    old_root_variance = tl.load(own + 2 * N, used, 0.0)
    old_reward = tl.load(own + 3 * N, used, 0.0)
    old_scales = tl.load(own + 4 * N, used, 0.0)
    old_initial_norm = tl.load(own + 5 * N, used, 0.0)
    old_largest_delta = tl.load(own + 6 * N, used, 0.0)
    old_largest_scale = tl.load(own + 7 * N, used, 0.0)
    old_steps = tl.load(own + 8 * N, used, 0.0)
    old_largest_rate = tl.load(own + 9 * N, used, 0.0)
    old_largest_grad = tl.load(own + 10 * N, used, 0.0)
    old_stake = tl.load(own + 11 * N, used, 0.0)
    old_nonfinite_steps = tl.load(own + 12 * N, used, 0.0)
    for field in tl.static_range(TUNER_ROWS):
        tl.store(unchanged + (tuner * TUNER_ROWS + field) * N + i, tl.load(own + field * N, used, 0.0), used)
    rate = _number(groups + first_group * GROUP, RATE)
    for group in range(first_group, last_group):
        rate_at = tl.load(groups + group * GROUP + RATE_AT)
        on_device = tl.load(rate_at.to(tl.pointer_type(tl.float32)), rate_at != 0, 0.0).to(tl.float64)
        number = _number(groups + group * GROUP, RATE)
        rate = tl.maximum(rate, tl.where(rate_at != 0, on_device, number))

    # mechanic.tuner.update
    scale = tl.sum(old_scales, 0)
    param_norm = tl.where(param_sq > 0, tl.sqrt(param_sq), ZERO_START_NORM)
    grad_norm, delta_norm = tl.sqrt(grad_sq), tl.sqrt(delta_sq)
    old_grad = tl.max(old_largest_grad, 0)
    bounded_grad = tl.minimum(tl.maximum(grad_norm, old_grad), GRADIENT_JUMP * old_grad)
    largest_grad = tl.where(tl.max(old_initial_norm, 0) > 0, bounded_grad, grad_norm)
    grad_share = grad_norm / tl.maximum(largest_grad, TINY)
    pull = decay * scale + tl.maximum(late_decay - late_decay / TINY_GRADIENT * grad_share, 0.0)
    feedback = delta_grad + pull * grad_norm * (delta_param / param_norm)

    largest_feedback = tl.maximum(betas * old_largest_feedback, tl.abs(feedback))
    root_variance = _hypot(betas * old_root_variance, feedback)
    reward = tl.maximum(betas * old_reward - old_scales * feedback, 0.0)

    initial_norm = tl.where(old_initial_norm > 0, old_initial_norm, param_norm)
    largest_delta = tl.maximum(old_largest_delta, delta_norm)
    some_delta = tl.maximum(largest_delta, TINY)
    stake = old_stake
    some_variance = tl.maximum(root_variance, TINY) + eps
    staked = config_s_init * largest_feedback / N
    if RELATIVE_START:
        staked = config_s_init / N * initial_norm * (largest_feedback / some_delta)
        poor = tl.sum(tl.where(used, reward - ENOUGH_WON * staked, 0.0), 0) < 0
        grown = tl.where(poor, tl.where(grad_share > SMALL_GRADIENT, stake * STAKE_GROWTH, stake), stake)
        fastest = tl.min(tl.where(used, betas, 2.0), 0)
        pays = tl.max(tl.where(used, tl.where(betas == fastest, reward, 0.0), 0.0), 0) > 0
        stake = tl.where(pays, grown, stake / STAKE_GROWTH)
        some_former = tl.maximum(old_root_variance, TINY)
        former = tl.maximum(tl.sum(old_largest_feedback / some_former, 0), 1e-9)
        share = tl.sum(tl.where(used, largest_feedback / some_variance, 0.0), 0)
        jump = tl.maximum(tl.where(feedback > 0, share / former, 1.0), 1.0)
        stake = tl.minimum(tl.maximum(stake / jump, 1.0), LARGEST_STAKE)
        staked = stake * staked

    wealth = staked + reward
    scales = wealth / some_variance
    scales = tl.where(used, scales, 0.0)
    if GUARD:
        fallen = scale / 2 * (old_largest_delta / some_delta) - tl.sum(scales, 0)
        scales = tl.where(used, scales + tl.maximum(fallen, 0.0) / N, 0.0)

    largest_rate = tl.maximum(old_largest_rate, rate)
    if SETTLE:
        calm = CALM_AFTER / tl.minimum(old_steps + 1, CALM_UNTIL)
        pace = tl.minimum(calm, _pace(rate, largest_rate))
        scales = old_scales + pace * (scales - old_scales)
    if BOUNDS:
        proposed = tl.sum(scales, 0)
        bounded = tl.minimum(tl.maximum(proposed, _number(config, MIN_LR)), _number(config, MAX_LR))
        factor = bounded / tl.where(proposed > 0, proposed, 1.0)
        scales = tl.where(used, tl.where(proposed > 0, scales * factor, bounded / N), 0.0)

    largest_scale = tl.maximum(old_largest_scale, tl.sum(scales, 0))
    total = delta_grad + delta_param + grad_sq + param_sq + delta_sq
    of_variance = tl.sum(tl.where(used, root_variance / N, 0.0), 0)
    finite = tl.where(_is_finite(total), of_variance, INFINITY) < INFINITY
    learns = tl.where(finite, grad_sq, 0.0) > 0
    largest_feedback = tl.where(learns, largest_feedback, old_largest_feedback)
    root_variance = tl.where(learns, root_variance, old_root_variance)
    reward = tl.where(learns, reward, old_reward)
    scales = tl.where(learns, scales, old_scales)
    initial_norm = tl.where(learns, initial_norm, old_initial_norm)
    largest_delta = tl.where(learns, largest_delta, old_largest_delta)
    largest_scale = tl.where(learns, largest_scale, old_largest_scale)
    steps = tl.where(learns, old_steps + 1, old_steps)
    largest_rate = tl.where(learns, largest_rate, old_largest_rate)
    largest_grad = tl.where(learns, largest_grad, old_largest_grad)
    stake = tl.where(learns, stake, old_stake)
    nonfinite_steps = tl.where(finite, old_nonfinite_steps, old_nonfinite_steps + 1)

    # mechanic.tuner.delta_retention
    new_scale = tl.sum(scales, 0)
    retention = scale * 0 + 1.0
    if FORGETS:
        former, largest = tl.max(old_largest_scale, 0), tl.max(tl.where(used, largest_scale, 0.0), 0)
        shrunk = tl.where(former > 0, former / tl.where(largest > 0, largest, 1.0), 1.0)
        limit = forgetting / (tl.max(old_steps, 0) + FINDING_STEPS)
        retention = tl.maximum(shrunk, 1 - limit)
        if SETTLE:
            peak = tl.max(tl.where(used, largest_rate, 0.0), 0)
            some_scale = tl.where(new_scale > 0, new_scale, 1.0)
            still = tl.where(tl.minimum(scale, new_scale) > 0, scale / some_scale, 1.0)
            span = limit * (1 - _pace(rate, peak))
            still = tl.minimum(tl.maximum(still, 1 - span), 1 + span)
            retention = tl.where(largest > former, retention, still)

    out = tuned + tuner * TUNED
    tl.store(out + SCALE, scale / retention)
    tl.store(out + CHANGE, new_scale - scale / retention)
    tl.store(out + RETENTION, retention)
    tl.store(out + FINITE, tl.where(_is_finite(stepped_grad_sq), 1.0, 0.0).to(tl.float64))
    tl.store(out + BEFORE, scale)
    tl.store(out + AFTER, new_scale)
    tl.store(out + STEPS, tl.max(old_steps, 0) + tl.max(old_nonfinite_steps, 0))
    for group in range(first_group, last_group):
        record = groups + group * GROUP
        row = tl.load(record + TUNER_AT).to(tl.pointer_type(tl.float64)) + i
        tl.store(row + N, largest_feedback, used)
        tl.store(row + 2 * N, root_variance, used)
        tl.store(row + 3 * N, reward, used)
        tl.store(row + 4 * N, scales, used)
        tl.store(row + 5 * N, initial_norm, used)
        tl.store(row + 6 * N, largest_delta, used)
        tl.store(row + 7 * N, largest_scale, used)
        tl.store(row + 8 * N, steps, used)
        tl.store(row + 9 * N, largest_rate, used)
        tl.store(row + 10 * N, largest_grad, used)
        tl.store(row + 11 * N, stake, used)
        tl.store(row + 12 * N, nonfinite_steps, used)
        shown_at = tl.load(record + SHOWN_AT)
        tl.store(shown_at.to(tl.pointer_type(tl.float64)), new_scale / _number(record, PEAK), shown_at != 0)
    if COUNTS:
        lane = tl.arange(0, RED)
        for tensor in range(tuner * RED, T, tl.num_programs(0) * RED):
            step_at = tl.load(words + (tensor + lane).to(tl.int64) * RECORD + STEP, tensor + lane < T, 0)
            counter = step_at.to(tl.pointer_type(tl.float32))
            tl.store(counter, tl.load(counter, step_at != 0, 0.0) + 1, step_at != 0)
