"""The tuner: Algorithm 1 of the paper, as far as it concerns the scales.

Everything here is arithmetic on small arrays and knows no framework: :func:`update` takes the array
module (``numpy``, ``torch`` or ``jax.numpy``) as an argument. One row is one tuner, so one tuner for all
parameters and several tuners for groups of them are the same code.

Notation: g gradient, x parameters, Delta the sum of the base optimizer's updates so far, S = sum of
the n scales s, one per beta. The parameters are always x_1 + S Delta.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mechanic.config import TunerConfig

Array = Any
"""A NumPy, torch or JAX array. The one place where the library gives up static types."""

SUMS = ("delta_grad", "delta_param", "grad_sq", "param_sq", "delta_sq")
"""The columns of ``sums``: ``<Delta,g>, <Delta,x>, |g|^2, |x|^2, |Delta|^2``. All that a step must measure."""

FINDING_STEPS = 50
"""About how many steps S takes to find its size. Until then Delta is young, and little of it is forgotten."""

ZERO_START_NORM = 1.0
"""Used as ``|x_1|`` if all parameters start at zero: about the norm of a small layer's usual initialisation."""

STAKE_GROWTH = 1.1
"""By how much the stake grows or shrinks in a step."""

LARGEST_STAKE = 1e4
"""The stake may grow to this many times its first size."""

ENOUGH_WON = 100.0
"""The stake grows while all rewards together are less than this many times what was staked at first."""

SMALL_GRADIENT = 0.2
"""The stake grows while the gradient is larger than this fraction of the largest one so far."""

TINY_GRADIENT = 0.02
"""Below this fraction of the largest gradient so far the train data are memorized, and ``late_decay`` acts."""

GRADIENT_JUMP = 2.0
"""A gradient counts as at most this many times the largest one before, so that one bad batch does not stand for all."""

CALM_AFTER = 1000
"""From this step t on, S makes at most 1000 / t of its change. It is then a mean over about the last t / 1000 steps."""

CALM_UNTIL = 50_000
"""From this step on, S makes at most a fiftieth of its change, so that it can still fall in a run of any length."""

TINY = 1e-37
"""Divisors are at least this, so that 0 / 0 is 0. It is a normal number in float32, too."""


class TunerState(NamedTuple):
    """What a tuner remembers, each array [tuners, n]. All zeros is the state before the first step."""

    largest_feedback: Array  # m
    root_variance: Array  # sqrt(v): its square would leave the range of float32 long before the gradients do
    reward: Array  # r
    scales: Array  # s
    initial_norm: Array  # |x_1|; 0 until measured
    largest_delta: Array  # max |Delta_k| over k <= t
    largest_scale: Array  # max S_k over k <= t
    steps: Array  # t, of those that had feedback
    largest_rate: Array  # max learning rate so far; 0 where none was told
    largest_grad: Array  # max |g_k| over k <= t, where each counts as at most twice the max before it
    stake: Array  # how many times as large as at first; 0 until the first step
    nonfinite_steps: Array  # how many steps had sums that were not finite
    rate_sum: Array = 0.0  # of the learning rates since step 50; of ones where none was told
    moved_sum: Array = 0.0  # of S times the learning rate, since step 50


def delta_retention(
    before: TunerState,
    after: TunerState,
    config: TunerConfig,
    xp: Any,
    rate: Array | None = None,
    scales: tuple[Array, Array] | None = None,
) -> Array | None:
    """k, the share of Delta that is kept in a step, [tuners]; None if nothing is ever forgotten.

    S scales all of Delta, also what was moved long ago and has settled since. Delta shrinks by as much as S grows, so
    that this stays where it is, in two cases: if S is larger than ever before, and as far as the schedule has brought
    the learning rate down. In the second case Delta also grows by as much as S shrinks. A step changes Delta by at most
    ``forgetting`` parts in t + 50, but for what :func:`within_bounds` does. ``scales`` is S before and after, if the
    caller has it.
    """
    if not config.forgetting:
        return None
    scale, new_scale = scales or (total_scale(before, xp), total_scale(after, xp))
    if config.has_bounds:
        before, unit = within_bounds(before, config, xp)
        scale = scale / unit.reshape(-1)
    # One number per tuner; the state holds it n times, so that all fields have one shape.
    former, largest, steps, peak = (
        next(iter(array.T)) for array in (before.largest_scale, after.largest_scale, before.steps, after.largest_rate)
    )
    limit = config.forgetting / (steps + FINDING_STEPS)
    moved = former > 0
    shrunk = xp.where(moved, former / xp.where(moved, largest, 1.0), 1.0)
    kept = xp.maximum(shrunk, 1 - limit)
    if rate is not None and config.settle:
        both = xp.minimum(scale, new_scale) > 0
        still = xp.where(both, scale / xp.where(both, new_scale, 1.0), 1.0)
        span = limit * (1 - _pace(rate.reshape(-1), peak, xp))
        kept = xp.where(largest > former, kept, xp.clip(still, 1 - span, 1 + span))
    return kept * unit.reshape(-1) if config.has_bounds else kept


def within_bounds(state: TunerState, config: TunerConfig, xp: Any) -> tuple[TunerState, Array]:
    """The tuners with S between ``min_lr`` and ``max_lr``, and by how much Delta grows for that, [tuners, 1].

    S is outside if a saved run is resumed with other bounds. Delta is then measured in another unit, in which S is
    within them, so that S Delta and with it the parameters stay. Without forgetting nothing changes Delta, so S stays.
    """
    scale = xp.sum(state.scales, -1, keepdims=True)
    inside = xp.clip(xp.clip(scale, config.min_lr, config.max_lr), TINY, None)
    unit = xp.where((scale > 0) & (config.forgetting > 0), scale / inside, 1.0)
    in_unit = {
        "largest_feedback": state.largest_feedback * unit,
        "root_variance": state.root_variance * unit,
        "scales": state.scales / unit,
        "largest_delta": state.largest_delta * unit,
        "largest_scale": state.largest_scale / unit,
    }
    return state._replace(**in_unit), unit


def total_scale(state: TunerState, xp: Any) -> Array:
    """S, the factor on Delta: the sum of the scales, [tuners]."""
    return xp.sum(state.scales, -1)


def learned_rate(state: TunerState, xp: Any) -> Array:
    """The mean of S, weighted with the learning rates of the steps, [tuners].

    The first steps, in which S finds its size, are left out; until then this is S. The last S is mostly noise if a
    schedule ends near 0, since such small steps tell little.
    """
    total, moved = state.rate_sum[..., 0], state.moved_sum[..., 0]
    return xp.where(total > 0, moved / xp.clip(total, TINY, None), total_scale(state, xp))


def is_dominated(state: TunerState, config: TunerConfig) -> Array:
    """Whether the squared feedback of one step is more than 500,000 times that of all others together, [tuners].

    S and the base's own state then take hundreds of steps to recover from it.
    """
    slowest = config.betas.index(max(config.betas))
    largest, root, steps = (array[..., slowest] for array in (state.largest_feedback, state.root_variance, state.steps))
    return (steps > FINDING_STEPS) & (largest > 0) & (root <= largest * (1 + 1e-6))


def is_at_bound(state: TunerState, config: TunerConfig, xp: Any) -> Array:
    """Whether S is held at ``min_lr`` or ``max_lr``, [tuners]; not told while S is still finding its size."""
    scale, found = total_scale(state, xp), state.steps[..., 0] > FINDING_STEPS
    return found & ((scale <= config.min_lr * (1 + 1e-6)) | (scale >= config.max_lr * (1 - 1e-6)))


def update(
    state: TunerState, sums: Array, betas: Array, config: TunerConfig, xp: Any, rate: Array | None = None
) -> TunerState:
    """One step of every tuner.

    Args:
        state: the tuners before the step.
        sums: [tuners, 5], the columns of :data:`SUMS`, measured before the base optimizer steps.
        betas: ``config.betas`` as an array, [n] or [tuners, n].
        config: see :class:`~mechanic.config.TunerConfig`.
        xp: the array module the arrays belong to.
        rate: [tuners] or [], the learning rate that the base is going to step with, in whatever unit.

    Returns:
        The tuners after the step. A row whose gradient is zero, or whose sums are not finite, is
        returned as it was, but within the bounds and with a count of the latter: such a step carries no feedback, and
        S must not drift on it.

    Example:
        >>> import numpy as np
        >>> config = TunerConfig()
        >>> state = TunerState(*np.zeros((14, 1, 5)))
        >>> sums = np.array([[-1.0, 0.0, 1.0, 4.0, 1.0]])
        >>> state = update(state, sums, np.array(config.betas), config, np)
        >>> f"{total_scale(state, np)[0]:.3f}"  # 1 % of |x_1| / |Delta|
        '0.020'
    """
    delta_grad, delta_param, grad_sq, param_sq, delta_sq = (column.reshape(-1, 1) for column in sums.T)  # [tuners, 1]
    if config.has_bounds:
        state, unit = within_bounds(state, config, xp)
        delta_grad, delta_param, delta_sq = delta_grad * unit, delta_param * unit, delta_sq * unit**2
    n = len(config.betas)
    scale = xp.sum(state.scales, -1, keepdims=True)  # S, [tuners, 1]

    # Where |x| = 0, <Delta,x> is 0 as well.
    param_norm = xp.where(param_sq > 0, xp.sqrt(param_sq), ZERO_START_NORM)
    grad_norm, delta_norm = xp.sqrt(grad_sq), xp.sqrt(delta_sq)
    has_started = state.initial_norm > 0
    bounded_grad = xp.clip(grad_norm, state.largest_grad, GRADIENT_JUMP * state.largest_grad)
    largest_grad = xp.where(has_started, bounded_grad, grad_norm)
    grad_share = grad_norm / xp.clip(largest_grad, TINY, None)
    pull = config.decay * scale  # lambda S
    if config.late_decay:
        pull = pull + xp.clip(config.late_decay - config.late_decay / TINY_GRADIENT * grad_share, 0.0, None)
    feedback = delta_grad + pull * grad_norm * (delta_param / param_norm)  # h

    largest_feedback = xp.maximum(betas * state.largest_feedback, xp.abs(feedback))
    root_variance = xp.hypot(betas * state.root_variance, feedback)
    reward = xp.clip(betas * state.reward - state.scales * feedback, 0.0, None)

    initial_norm, stake = xp.where(has_started, state.initial_norm, param_norm), state.stake
    largest_delta = xp.maximum(state.largest_delta, delta_norm)
    some_delta = xp.clip(largest_delta, TINY, None)
    some_variance = xp.clip(root_variance, TINY, None)
    if config.eps:
        some_variance = some_variance + config.eps
    if not config.relative_start:
        staked = config.s_init * largest_feedback / n
    else:
        # It moves x by at most this fraction of |x_1| at first, whatever the size of the base's updates.
        staked = config.s_init / n * initial_norm * (largest_feedback / some_delta)
        # On a plateau nothing is won with that. So the stake grows while the last steps do not speak against Delta,
        # little has been won and training has not converged.
        poor = xp.sum(reward - ENOUGH_WON * staked, -1, keepdims=True) < 0
        grown = xp.where(poor & (grad_share > SMALL_GRADIENT), stake * STAKE_GROWTH, stake)
        pays = tuple(reward.T)[config.betas.index(min(config.betas))].reshape(-1, 1) > 0  # for the fastest scale
        stake = xp.where(pays, grown, stake / STAKE_GROWTH)
        # S gets m / sqrt(v) of the stake, which jumps with a feedback larger than all before. If that speaks against
        # Delta, S must not rise by it: the next step would be a larger mistake, and so on.
        # Before the first feedback the former share is 0, and the stake has not grown.
        some_former = xp.clip(state.root_variance, TINY, None)
        former = xp.clip(xp.sum(state.largest_feedback / some_former, -1, keepdims=True), 1e-9, None)
        share = xp.sum(largest_feedback / some_variance, -1, keepdims=True)
        jump = xp.clip(xp.where(feedback > 0, share / former, 1.0), 1.0, None)
        stake = xp.clip(stake / jump, 1.0, LARGEST_STAKE)
        staked = stake * staked

    wealth = staked + reward  # W
    scales = wealth / some_variance
    if config.guard:
        # Near interpolation one bad batch can set every reward to zero, and x would jump back to its start. At most
        # half of the distance from it is lost, not of S: a young Delta can grow many times over in one step.
        fallen = scale / 2 * (state.largest_delta / some_delta) - xp.sum(scales, -1, keepdims=True)
        scales = scales + xp.clip(fallen, 0.0, None) / n

    steps, largest_rate = state.steps + 1, state.largest_rate
    if rate is not None:
        rate = rate.reshape(-1, 1)
        largest_rate = xp.maximum(largest_rate, rate)
    if config.settle:
        # A change of S moves the parameters along all of Delta. Late in a run, a few batches should not do that.
        calm = CALM_AFTER / xp.clip(steps, None, CALM_UNTIL)
        pace = 1.0 if rate is None else _pace(rate, largest_rate, xp)
        scales = state.scales + xp.clip(calm, None, pace) * (scales - state.scales)

    if config.has_bounds:
        total = xp.sum(scales, -1, keepdims=True)
        bounded = xp.clip(total, config.min_lr, config.max_lr)
        scales = xp.where(total > 0, scales * (bounded / xp.where(total > 0, total, 1.0)), bounded / n)

    new_scale = xp.sum(scales, -1, keepdims=True)
    largest_scale = xp.maximum(state.largest_scale, new_scale)
    weight = xp.where(steps > FINDING_STEPS, 1.0 if rate is None else rate, 0.0)
    rate_sum, moved_sum = state.rate_sum + weight, state.moved_sum + weight * new_scale
    sizes = initial_norm, largest_delta, largest_scale
    others = steps, largest_rate, largest_grad, stake, state.nonfinite_steps, rate_sum, moved_sum
    proposed = TunerState(largest_feedback, root_variance, reward, scales, *sizes, *others)
    # In float32 the root of the sum of squares can overflow where the feedback does not, and would stay infinite. That
    # of the slowest beta is the largest.
    root = tuple(root_variance.T)[config.betas.index(max(config.betas))].reshape(-1, 1)
    finite = xp.abs(xp.sum(sums, -1, keepdims=True) + root) < xp.inf  # isfinite takes more launches on a GPU
    has_feedback = finite & (grad_sq > 0)
    learned = TunerState(*xp.where(has_feedback, xp.stack(proposed), xp.stack(state)))
    return learned._replace(nonfinite_steps=xp.where(finite, state.nonfinite_steps, state.nonfinite_steps + 1))


def _pace(rate: Array, largest_rate: Array, xp: Any) -> Array:
    """The learning rate as a share of its peak; 0 where it is below 0, at the end of a linear schedule."""
    return xp.clip(rate / xp.clip(largest_rate, TINY, None), 0.0, 1.0)
