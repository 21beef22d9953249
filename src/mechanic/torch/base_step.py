"""The base's own step, during which it does not notice Mechanic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.bases import casts_state
from mechanic.torch.buckets import Bucket, replaced
from mechanic.torch.kernels.rounding import is_half_precision
from mechanic.torch.layout import FROZEN, PEAK_LR, STATE_KEYS, Group, params_of
from mechanic.torch.private import global_hooks_silenced


def step_base(
    base: Optimizer,
    buckets: list[Bucket],
    *,
    scale_lr: bool,
    instead: Callable[[], Any] | None,
    only_these: bool = False,
) -> list[list[Tensor]]:
    """Let the base step on what the buckets lend it, and return that as the base left it.

    With ``instead``, that function is called in place of the base's step; it may move all parameters, those without a
    gradient included. During the call the base sees only its own state, and only the parameters of the buckets if
    ``only_these``. It sees learning rates as fractions of their peak, times the frozen scale if ``scale_lr``. If it
    fails, only its own state has changed, unless it stepped on Delta itself; the error says so.
    """
    groups = base.param_groups
    lrs, decays = ([group.get(key) for group in groups] for key in ("lr", "weight_decay"))
    params = [group["params"] for group in groups]
    steps_on_delta = any(bucket.steps_on_delta for bucket in buckets)  # then x decays in prepare_delta
    # A base initialises state[p] if it is empty, so it must not see our entries.
    ours = {
        p: {key: state.pop(key) for key in STATE_KEYS if key in state}
        for bucket in buckets
        for p in bucket.params
        if (state := base.state.get(p))
    }
    # The base would also step a parameter that is not trained but still has a gradient.
    idle_grads = {p: p.grad for p in params_of(groups) if not p.requires_grad and p.grad is not None}
    has_stepped = False
    try:
        for group, lr, decay in zip(groups, lrs, decays, strict=True):
            if lr is not None:
                group["lr"] = lr / group[PEAK_LR] * (group[FROZEN] if scale_lr else 1.0)
            if decay and steps_on_delta:
                group["weight_decay"] = 0.0
        for p in idle_grads:
            p.grad = None
        for bucket in buckets:
            if bucket.has_grad or (instead and bucket.moves):
                bucket.lend()
                match_state(base, bucket)
        if instead or only_these:  # it may move all parameters it sees, so it sees only those that are lent
            seen = {p for bucket in buckets if bucket.moves for p in bucket.params}
            for group in groups:
                group["params"] = [p for p in group["params"] if p in seen]
        stand_ins = {p: twin for bucket in buckets for p, twin in bucket.stand_ins.items()}
        with global_hooks_silenced(), replaced(base, stand_ins):
            (instead or base.step)()
        has_stepped = True
    except BaseException as error:
        _say_what_has_changed(error, parameters=only_these or any(bucket.lends_delta for bucket in buckets))
        raise
    finally:
        stepped = [bucket.take_back() for bucket in buckets]
        for p, grad in idle_grads.items():
            p.grad = grad
        for group, all_params, lr, decay in zip(groups, params, lrs, decays, strict=True):
            group["params"] = all_params
            if lr is not None:
                group["lr"] = lr
            if decay is not None:
                group["weight_decay"] = decay
        for bucket in buckets:
            # Also if the base failed halfway: wherever it has made state, Delta is kept beside it.
            fresh = zip(bucket.params, bucket.mechanic_state, strict=True) if bucket.moves else ()
            ours.update((p, entries) for p, entries in fresh if has_stepped or base.state.get(p))
        for p, entries in ours.items():
            base.state[p].update(entries)
        if not has_stepped:
            for bucket, lent in zip(buckets, stepped, strict=True):
                bucket.give_up(lent, forgotten={p for p in bucket.params if p not in ours})
    return stepped


def match_state(base: Optimizer, bucket: Bucket) -> None:
    """Cast what torch's own optimizers keep of half-precision parameters to the dtype that they are about to see.

    It differs if what they see has changed: a hook on the base's step brings copies in float32, for example.
    """
    if not is_half_precision(bucket.dtype) or not casts_state(base):
        return
    for p in bucket.params:
        for key, value in base.state.get(p, {}).items():
            is_like_p = key != "step" and isinstance(value, Tensor) and value.shape == p.shape
            if is_like_p and value.dtype != bucket.lent_dtype and value.is_floating_point():
                base.state[p][key] = value.to(bucket.lent_dtype)


@contextmanager
def shown_only(base: Optimizer, shown: list[tuple[Group, list[Tensor]]]) -> Iterator[None]:
    """For the time being, the base has only these groups, with only these of their parameters."""
    groups, params = base.param_groups, [group["params"] for group, _ in shown]
    base.param_groups = [group for group, _ in shown]
    for group, some in shown:
        group["params"] = some
    try:
        yield
    finally:
        base.param_groups = groups
        for (group, _), everything in zip(shown, params, strict=True):
            group["params"] = everything


def numbers_in(group: Group) -> dict[str, Any]:
    """What a base can count in a group."""
    return {key: value for key, value in group.items() if isinstance(value, int | float)}


@contextmanager
def counting_from(group: Group, numbers: dict[str, Any]) -> Iterator[None]:
    """For the time being a group has these numbers, and no others: some bases count their steps in the group.

    What the base has changed stays. What somebody else has written to the group since comes back.
    """
    found = numbers_in(group)
    _set_numbers(group, numbers)
    try:
        yield
    finally:
        counted = {key: value for key, value in numbers_in(group).items() if numbers.get(key) != value}
        _set_numbers(group, {**found, **counted})


def _set_numbers(group: Group, numbers: dict[str, Any]) -> None:
    for key in numbers_in(group).keys() - numbers.keys():
        del group[key]
    group.update(numbers)


def _say_what_has_changed(error: BaseException, *, parameters: bool) -> None:
    """Add a line below the traceback. Python 3.10 has no such lines."""
    if hasattr(error, "add_note"):
        moved = (
            "some parameters may have moved by part of a step, and with them"
            if parameters
            else "no parameter has moved, but"
        )
        error.add_note(
            f"Mechanic: the base failed during its update: {moved} some of the base's own state. "
            "Training can go on; to repeat the step exactly, load a checkpoint."
        )
