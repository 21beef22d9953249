"""Putting parameters into buckets, with what Mechanic keeps of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mechanic.torch.buckets import Bucket
from mechanic.torch.kernels.rounding import RESIDUAL_DTYPE, is_half_precision
from mechanic.torch.layout import DELTA, DELTA_SCALES, RESIDUAL, ROW, Group
from mechanic.torch.shards import Reduction, cut_grad_as_parameter, dtensor_class, shard_number
from mechanic.torch.stored import SHARD, StoredBucket, delta_state_of, dtype_of_delta, is_stored
from mechanic.torch.tuners import rows_of


def mechanic_state_of(
    p: Tensor, state: dict[str, Tensor], *, frozen: bool, delta: torch.dtype | str | None
) -> dict[str, Tensor]:
    """What Mechanic keeps of a parameter, from its state or new: Delta, and a residual if it is in half precision."""
    kept = {} if frozen else delta_state_of(p, state, dtype_of_delta(p.dtype, delta))
    if is_half_precision(p.dtype):
        residual = state.get(RESIDUAL)
        kept[RESIDUAL] = torch.zeros_like(p, dtype=RESIDUAL_DTYPE) if residual is None else residual.to(RESIDUAL_DTYPE)
    return kept


def buckets_of(
    groups: list[Group],
    state: Any,
    reduction: Reduction,
    *,
    frozen: bool,
    ascends: bool,
    own_iterates: bool,
    decays: list[float] | None,
    delta: torch.dtype | str | None,
    in_own_dtype: bool,
) -> list[Bucket]:
    """The trainable parameters and what Mechanic keeps of them, in lists that can be worked on as one.

    ``decays``, by group, are given if the base is to step on Delta. ``delta`` is what Delta is stored in. If it is to
    step on Delta ``in_own_dtype``, it does so with bfloat16 parameters.
    """
    buckets: dict[tuple[Any, ...], Bucket] = {}
    rows = rows_of(groups)
    dtensor = dtensor_class()
    number = -1  # of the parameter among those that are trained
    for group, decay in zip(groups, decays or [0.0] * len(groups), strict=True):
        row, sign = rows[group[ROW]], -1.0 if group.get("maximize", ascends) else 1.0
        for p in group["params"]:
            if not p.requires_grad:
                continue
            number += 1
            grad, kept = p.grad, state.get(p, {})
            _check(p, grad, kept)
            sharded = dtensor is not None and isinstance(p, dtensor)
            if sharded:
                cut_grad_as_parameter(p)
            has_grad = grad is not None
            # A parameter that never had a gradient has no state. It has not moved, and will not move now.
            moves = has_grad or DELTA in kept
            key = (row, sign, reduction.weight(p), p.device, p.dtype, sharded, has_grad, moves, decay)
            if (bucket := buckets.get(key)) is None:
                own = in_own_dtype and decays is not None and p.dtype == torch.bfloat16
                stored = not frozen and is_stored(p.dtype, delta)
                options: dict[str, Any] = {"own_iterates": own_iterates, "steps_on_delta": decays is not None}
                if own or stored:
                    options |= {"in_own_dtype": own, "stored_in": dtype_of_delta(p.dtype, delta)}
                bucket = (StoredBucket if own or stored else Bucket)(*key, **options)
                buckets[key] = bucket
            bucket.params.append(p)
            bucket.mechanic_state.append(mechanic_state_of(p, kept, frozen=frozen, delta=delta) if moves else {})
            if isinstance(bucket, StoredBucket):
                bucket.numbers.append(number + (shard_number(p) << SHARD if sharded else 0))
    return list(buckets.values())


def _check(p: Tensor, grad: Tensor | None, kept: dict[str, Tensor]) -> None:
    if grad is not None and grad.layout != torch.strided:
        raise ValueError(
            f"Mechanic needs dense gradients, got one of layout {grad.layout}; build the embedding with sparse=False"
        )
    if DELTA in kept and kept[DELTA].shape != p.shape:
        if DELTA_SCALES in kept:
            raise ValueError(
                f"a parameter has shape {tuple(p.shape)} now, and its state 'mechanic_delta' still "
                f"{tuple(kept[DELTA].shape)}, in int8, which cannot be resized; load a checkpoint that was resized"
            )
        raise ValueError(
            f"a parameter has shape {tuple(p.shape)} now, and its state 'mechanic_delta' still "
            f"{tuple(kept[DELTA].shape)}; where parameters are resized in mid-training, resize all tensors of "
            "optimizer.state[p] with them, with zeros for new elements of 'mechanic_delta'"
        )
