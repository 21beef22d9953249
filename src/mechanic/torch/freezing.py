"""Keep what was learned: stop tuning, or hand over to the base alone."""

from __future__ import annotations

from typing import Any

import torch

from mechanic.torch import tuners
from mechanic.torch.buckets import Bucket
from mechanic.torch.kernels.rounding import is_half_precision
from mechanic.torch.layout import DELTA, DELTA_SCALES, FROZEN, PEAK_LR, RESIDUAL, params_of
from mechanic.torch.probe import is_linear_in_lr
from mechanic.torch.step import sum_by_tuner
from mechanic.torch.stored import parts_of
from mechanic.torch.wrapped import BaseT, Wrapped
from mechanic.tuner import total_scale


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
    for p in params_of(wrapped.groups):
        for key in (DELTA, DELTA_SCALES):
            wrapped.base.state.get(p, {}).pop(key, None)


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
    for p in params_of(groups):
        base.state.get(p, {}).pop(RESIDUAL, None)
    base.load_state_dict(base.state_dict())  # casts the moments to the parameters' dtype
    return base


def scales_by_lr(wrapped: Wrapped[Any]) -> bool:
    """Whether the frozen scale can be multiplied into the base's learning rate."""
    if wrapped.is_linear_in_lr is None:
        wrapped.is_linear_in_lr = is_linear_in_lr(wrapped.base)
    return wrapped.is_linear_in_lr


def step_frozen(wrapped: Wrapped[Any]) -> None:
    """The base's own step at lr times the frozen scale.

    It steps on copies if the parameters are in half precision, or if its update is not proportional to lr and has to
    be scaled afterwards. It makes its update apart from them if it sees bfloat16 parameters in their own dtype.
    """
    linear = scales_by_lr(wrapped)
    in_place = linear and not any(is_half_precision(dtype) for dtype in wrapped.dtypes())
    in_bfloat16 = wrapped.is_in_own_dtype and wrapped.dtypes() == {torch.bfloat16}
    decays = wrapped.decays_beside_delta() if in_bfloat16 else None
    linear = linear and decays is None
    buckets: list[Bucket] = []
    if wrapped.skip_nonfinite or not in_place:
        reduction, buckets = wrapped.reduction_and_buckets(decays)
        if wrapped.skip_nonfinite:
            like = wrapped.read_tuners(buckets)[1].scales
            if not reduction.sum(sum_by_tuner([(b.row, b.grad_sq()) for b in buckets], 1, like)).isfinite().all():
                wrapped.count_skipped_step()
                return
    buckets = [] if in_place else [bucket for bucket in buckets if bucket.has_grad]
    parts = parts_of(buckets)
    for part in parts:
        stepped = wrapped.step_base(part, scale_lr=linear, only_these=len(parts) > 1)
        for bucket, copies in zip(part, stepped, strict=True):
            scale = None if linear else total_scale(wrapped.read_tuners([bucket])[1], torch)
            bucket.move_frozen(copies, scale)
    tuners.remember_rates(wrapped.groups)
