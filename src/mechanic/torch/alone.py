"""The base's step, taken as if Mechanic were not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from mechanic.torch.buckets import Bucket
from mechanic.torch.checkpoint import STATE_KEYS
from mechanic.torch.groups import params_of


def step_alone(
    base: Optimizer, buckets: list[Bucket], *, scale_lr: bool = False, instead: Callable[[], Any] | None = None
) -> list[list[Tensor]]:
    """Step the base on what the buckets lend it, and return that as the base left it.

    ``instead`` of its step the base may do something else to all its parameters, those without a gradient included.
    Meanwhile the base sees its own state only, and learning rates in units of those it was built with, times a frozen
    scale if ``scale_lr``. Where it fails, nothing but its own state has moved, unless it was lent Delta itself.
    """
    groups = base.param_groups
    lrs, decays = ([group.get(key) for group in groups] for key in ("lr", "weight_decay"))
    params = [group["params"] for group in groups]
    decays_here = not any(bucket.lends_delta_at is not None for bucket in buckets)  # not of Delta
    # Bases ask whether state[p] is empty to initialise it.
    own = {
        p: {key: state.pop(key) for key in STATE_KEYS if key in state}
        for bucket in buckets
        for p in bucket.params
        if (state := base.state.get(p))
    }
    # The base would step a parameter that is not to be trained but still has a gradient.
    idle_grads = {p: p.grad for p in params_of(groups) if not p.requires_grad and p.grad is not None}
    has_stepped = False
    try:
        for group, lr, decay in zip(groups, lrs, decays, strict=True):
            if lr is not None:
                group["lr"] = lr / group["mechanic_unit"] * (group["mechanic_frozen"] if scale_lr else 1.0)
            if decay and not decays_here:
                group["weight_decay"] = 0.0
        for p in idle_grads:
            p.grad = None
        for bucket in buckets:
            if bucket.has_grad or (instead and bucket.moves):
                bucket.lend()
        if instead:  # it may move every parameter that it has, so it gets to see only those that are lent to it
            seen = {p for bucket in buckets if bucket.moves for p in bucket.params}
            for group in groups:
                group["params"] = [p for p in group["params"] if p in seen]
        with global_hooks_silenced():
            (instead or base.step)()
        has_stepped = True
    finally:
        stepped = [bucket.take_back() for bucket in buckets]
        for p, grad in idle_grads.items():
            p.grad = grad
        for group, whole, lr, decay in zip(groups, params, lrs, decays, strict=True):
            group["params"] = whole
            if lr is not None:
                group["lr"] = lr
            if decay is not None:
                group["weight_decay"] = decay
        for bucket in buckets:
            # Also where the base failed halfway: Delta stands beside all state it has made.
            fresh = zip(bucket.params, bucket.own, strict=True) if bucket.moves else ()
            own.update((p, entries) for p, entries in fresh if has_stepped or base.state.get(p))
        for p, entries in own.items():
            base.state[p].update(entries)
        if not has_stepped:
            for bucket, lent in zip(buckets, stepped, strict=True):
                bucket.give_up(lent, forgotten={p for p in bucket.params if p not in own})
    return stepped


@contextmanager
def global_hooks_silenced() -> Iterator[None]:
    """Keep hooks on all optimizers to one call per step, Mechanic's; the base's step is part of it.

    torch looks its two registries up by name, so empty ones stand in for them meanwhile. Where other threads step
    optimizers of their own, their hooks are silenced as well.
    """
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    registries: dict[str, Any] = {name: getattr(torch_optimizer, name) for name in names}
    if not any(registries.values()):
        yield
        return
    stand_ins = {name: type(registry)() for name, registry in registries.items()}
    vars(torch_optimizer).update(stand_ins)
    try:
        yield
    finally:
        for name, registry in registries.items():
            registry.update(stand_ins[name])  # what was registered meanwhile
        vars(torch_optimizer).update(registries)
