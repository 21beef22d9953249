"""Which optimizers can be wrapped: those that read .grad and add an update to the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.layout import PEAK_LR
from mechanic.torch.private import is_fsdp1_parameter, step_hooks
from mechanic.torch.shards import is_split_too_far
from mechanic.torch.together import members_of, owners_of
from mechanic.torch.warn import warn_user

_SEVERAL_GRADIENTS = "it needs several gradients per step from a closure, and Mechanic's feedback is one gradient"
_IN_BACKWARD = "it steps inside the backward pass, and Mechanic's feedback is a sum over all gradients"
_TUNER = "it already learns the size of its steps, and two tuners on one step fight each other; use one of them"

# By class name, since none of these packages is a dependency.
_REFUSED = {
    "LBFGS": _SEVERAL_GRADIENTS,
    "SparseAdam": "it needs sparse gradients, and Mechanic's Delta is dense; use Adam and sparse=False",
    "LOMO": _IN_BACKWARD,
    "AdaLOMO": _IN_BACKWARD,
    "CPUOffloadOptimizer": "it steps copies of the parameters on the CPU and lays them over the parameters, unscaled; "
    "shard with fully_shard(..., offload_policy=CPUOffloadPolicy()), then Delta and state are on the CPU as well",
    **dict.fromkeys(("Mechanic", "DoG", "LDoG", "DoWG", "TRAC"), _TUNER),
}
_REFUSED_PREFIXES = {"DAdapt": _TUNER, "Prodigy": _TUNER}
_WITH_OWN_ITERATES = {"Lookahead", "Ranger", "Ranger21", "Ranger25", "MADGRAD", "FTRL", "AccSGD"}


def refuse_unsuitable(base: Any) -> None:
    """Raise a TypeError or ValueError that says what to do if ``base`` cannot be wrapped."""
    if inspect.isclass(base):
        name = base.__name__
        raise TypeError(
            f"Mechanic wraps an optimizer instance, got the class {name}; "
            f"write Mechanic({name}(params, lr=1.0)), or mechanic_class({name}) for a class"
        )
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"Mechanic wraps a torch.optim.Optimizer instance, got {type(base).__name__}; "
            "write Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0)), or Mechanic(Together(first, second))"
        )
    for member in members_of(base):
        if reason := _reason_to_refuse(member):
            raise TypeError(f"Mechanic cannot wrap {type(member).__name__}: {reason}")
    if len({ascends(member) for member in members_of(base)}) > 1:
        raise ValueError("one of the optimizers has maximize=True and another has not; build them alike")
    if any("mechanic_format" in group for group in base.param_groups):
        raise ValueError(
            f"this {type(base).__name__} is already wrapped, or was loaded from a Mechanic's checkpoint; "
            "wrap a new one, and load the checkpoint into the Mechanic"
        )
    if any(group.get("differentiable") for group in base.param_groups):
        raise ValueError("Mechanic cannot differentiate through its step; build the base without differentiable=True")


def refuse_parts_of_matrices(base: Optimizer) -> None:
    """Raise if a Muon would step on parts of matrices: made orthogonal one by one, they give another update.

    DTensors are no such parts: what Muon computes with them, torch computes with the whole.
    """
    for owner, group in zip(owners_of(base), base.param_groups, strict=True):
        if not any("Muon" in cls.__name__ for cls in type(owner).__mro__) or not group.get("use_muon", True):
            continue
        name, params = type(owner).__name__, [p for p in group["params"] if p.requires_grad]
        if any(is_flat_part(p) for p in params):
            raise ValueError(
                f"{name} needs whole matrices, and under FullyShardedDataParallel or DeepSpeed's ZeRO it is given flat "
                "parts of them; shard with fully_shard, whose parts it can gather, or use DDP"
            )
        if too_small := [tuple(p.shape) for p in params if is_split_too_far(p)]:
            raise ValueError(
                f"{name} cannot step on a matrix that is split over more ranks than it has rows or columns, here one "
                f"of shape {too_small[0]}; give it to another optimizer, as MechanicMuon(model, roles={{its name: "
                "'vector'}) does, or shard it over fewer ranks"
            )


def is_flat_part(p: Tensor) -> bool:
    """Whether a framework has put a flat piece of memory in place of a parameter."""
    return is_fsdp1_parameter(p) or (p.ndim < 2 and not isinstance(p, torch.nn.Parameter))


class DirectStepCheck:
    """A hook on the base that warns, once, if somebody steps the base instead of the Mechanic around it."""

    def __init__(self, base: Optimizer) -> None:
        self._is_expected = False
        self._has_warned = False
        self._handles = [each.register_step_pre_hook(self) for each in {base, *members_of(base)}]

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not (self._is_expected or self._has_warned):
            self._has_warned = True
            warn_user(
                f"the step() of {type(optimizer).__name__} was called directly, so its update was applied unscaled; "
                "call the step() of the Mechanic around it"
            )

    @contextmanager
    def expected(self) -> Iterator[None]:
        """To use while Mechanic itself steps the base."""
        self._is_expected = True
        try:
            yield
        finally:
            self._is_expected = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def keeps_own_iterates(base: Optimizer) -> bool:
    """Whether the base is known to keep iterates beside the parameters: scaling the parameters would separate them."""
    return any(
        (callable(getattr(member, "train", None)) and callable(getattr(member, "eval", None)))  # Schedule-Free
        or any(cls.__name__ in _WITH_OWN_ITERATES for cls in type(member).__mro__)
        for member in members_of(base)
    )


def ascends(base: Optimizer) -> bool:
    """Whether a base maximizes; of bases where that is no option of the groups."""
    return any(bool(getattr(member, "maximize", False)) for member in members_of(base))


def has_hooks(base: Optimizer) -> bool:
    """Whether somebody may look at the base's parameters around its step."""
    optimizers = {base, *members_of(base)}
    return any(not isinstance(hook, DirectStepCheck) for optimizer in optimizers for hook in step_hooks(optimizer))


def _reason_to_refuse(base: Optimizer) -> str | None:
    for cls in type(base).__mro__:
        if cls.__name__ in _REFUSED:
            return _REFUSED[cls.__name__]
        for prefix, reason in _REFUSED_PREFIXES.items():
            if cls.__name__.startswith(prefix):
                return reason
    if hasattr(base, "first_step") and hasattr(base, "second_step"):  # the shape every SAM shares
        return _SEVERAL_GRADIENTS
    closure = inspect.signature(base.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return _SEVERAL_GRADIENTS
    return None


_VALUE_INDEPENDENT = {
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop")
}
"""Bases whose update does not depend on the parameter values, but for weight decay."""


_KNOWS_BFLOAT16 = {getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "RAdam", "RMSprop", "Adadelta")}
"""Those of them that train as well with state in bfloat16, rounded to nearest, as in float32; see docs/memory.md."""


_LOW_BIT = {
    *(f"torchao.optim.adam.{name}" for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    *(f"bitsandbytes.optim.adamw.{name}" for name in ("AdamW8bit", "PagedAdamW8bit")),
    *(f"bitsandbytes.optim.lion.{name}" for name in ("Lion8bit", "PagedLion8bit")),
}
"""Bases with state in few bits, whose update does not depend on the values but for a decoupled weight decay."""


def is_low_bit(base: Optimizer) -> bool:
    return f"{type(base).__module__}.{type(base).__qualname__}" in _LOW_BIT


def casts_state(base: Optimizer) -> bool:
    """Whether a base keeps its state in the dtype that it sees, and may do so in bfloat16."""
    return all(type(member) in _KNOWS_BFLOAT16 for member in members_of(base))


def knows_bfloat16(base: Optimizer) -> bool:
    """Whether a base may step on Delta and make its state of bfloat16 parameters as it does by itself."""
    known = all(type(member) in _KNOWS_BFLOAT16 or is_low_bit(member) for member in members_of(base))
    return known and decoupled_decays(base, also_at_zero=True) is not None


def decoupled_decays(base: Optimizer, *, also_at_zero: bool = False) -> list[float] | None:
    """lr times weight decay, by param group, of a base that can step on Delta in place of the parameters.

    None if it cannot: if its update may depend on the values, if somebody else may look at them, or if lr is 0 or may
    be. A step at lr = 0 has to leave every bit of the parameters as it is, which ``also_at_zero`` says it does.
    """
    known = all(type(member) in _VALUE_INDEPENDENT or is_low_bit(member) for member in members_of(base))
    if not known or has_hooks(base):
        return None
    decays = []
    for owner, group in zip(owners_of(base), base.param_groups, strict=True):
        lr, decay = group["lr"], group.get("weight_decay", 0.0)
        low_bit = is_low_bit(owner)
        is_decoupled = low_bit or type(owner) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
        if low_bit and isinstance(lr, Tensor) and lr.device.type == "cpu":
            lr = float(lr)  # torchao makes a tensor of any
        if isinstance(lr, Tensor) or isinstance(decay, Tensor) or (decay and not is_decoupled):
            return None
        if lr == 0 and not also_at_zero:
            return None
        decays.append(lr / group[PEAK_LR] * decay)
    return decays
