"""Which optimizers can be wrapped: those that read .grad and add an update to the parameters."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_SEVERAL_GRADIENTS = "it needs several gradients per step from a closure, and Mechanic's feedback is one gradient"
_OWN_ITERATES = (
    "it keeps iterates of its own beside the parameters, which scaling the parameters would tear apart; "
    "write Mechanic(..., own_iterates=True)"
)
_IN_BACKWARD = "it steps inside the backward pass, and Mechanic's feedback is a sum over all gradients"
_TUNER = "it already learns the size of its steps, and two tuners on one step fight each other; use one of them"

# By class name, since none of these packages is a dependency.
_REFUSED = {
    "LBFGS": _SEVERAL_GRADIENTS,
    "SparseAdam": "it needs sparse gradients, and Mechanic's Delta is dense; use Adam and sparse=False",
    "LOMO": _IN_BACKWARD,
    "AdaLOMO": _IN_BACKWARD,
    **dict.fromkeys(("Lookahead", "Ranger", "Ranger21", "Ranger25", "MADGRAD", "FTRL", "AccSGD"), _OWN_ITERATES),
    **dict.fromkeys(("Mechanic", "DoG", "LDoG", "DoWG", "TRAC"), _TUNER),
}
_REFUSED_PREFIXES = {"DAdapt": _TUNER, "Prodigy": _TUNER}


def refuse_unsuitable(base: Any, *, own_iterates: bool = False) -> None:
    """Raise a TypeError or ValueError that says what to do where ``base`` cannot be wrapped."""
    if inspect.isclass(base):
        name = base.__name__
        raise TypeError(
            f"Mechanic wraps an optimizer instance, got the class {name}; "
            f"write Mechanic({name}(params, lr=1.0)), or mechanize({name}) for a class"
        )
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"Mechanic wraps a torch.optim.Optimizer instance, got {type(base).__name__}; "
            "write Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))"
        )
    reason = _reason_to_refuse(base)
    if reason and not (reason == _OWN_ITERATES and own_iterates):
        raise TypeError(f"Mechanic cannot wrap {type(base).__name__}: {reason}")
    if any("mechanic_format" in group for group in base.param_groups):
        raise ValueError(
            f"this {type(base).__name__} is already wrapped, or was loaded from a Mechanic's checkpoint; "
            "wrap a new one, and load the checkpoint into the Mechanic"
        )
    if any(group.get("differentiable") for group in base.param_groups):
        raise ValueError("Mechanic cannot differentiate through its step; build the base without differentiable=True")


class DirectStepCheck:
    """A hook on the base that warns, once, where somebody steps the base instead of the Mechanic around it."""

    def __init__(self, base: Optimizer) -> None:
        self._is_expected = False
        self._has_warned = False
        self._handle = base.register_step_pre_hook(self)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not (self._is_expected or self._has_warned):
            self._has_warned = True
            warnings.warn(
                f"the step() of {type(optimizer).__name__} was called directly, so its update was applied unscaled; "
                "call the step() of the Mechanic around it",
                stacklevel=4,
            )

    @contextmanager
    def expected(self) -> Iterator[None]:
        """While Mechanic itself steps the base."""
        self._is_expected = True
        try:
            yield
        finally:
            self._is_expected = False

    def remove(self) -> None:
        self._handle.remove()


def has_hooks(base: Optimizer) -> bool:
    """Whether somebody may look at the base's parameters around its step."""
    pre_hooks: Iterable[Any] = base._optimizer_step_pre_hooks.values()
    return bool(base._optimizer_step_post_hooks) or any(not isinstance(hook, DirectStepCheck) for hook in pre_hooks)


def _reason_to_refuse(base: Optimizer) -> str | None:
    for cls in type(base).__mro__:
        if cls.__name__ in _REFUSED:
            return _REFUSED[cls.__name__]
        for prefix, reason in _REFUSED_PREFIXES.items():
            if cls.__name__.startswith(prefix):
                return reason
    if hasattr(base, "first_step") and hasattr(base, "second_step"):  # the shape every SAM shares
        return _SEVERAL_GRADIENTS
    if callable(getattr(base, "train", None)) and callable(getattr(base, "eval", None)):  # Schedule-Free
        return _OWN_ITERATES
    closure = inspect.signature(base.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return _SEVERAL_GRADIENTS
    return None


_BLIND = {
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop")
}


def decays_of_blind(base: Optimizer) -> list[float] | None:
    """What a base that is known not to look at the values it steps on takes of them by decoupled weight decay.

    By param group, times lr: its update is what it would be anywhere, less so much of x. None where it may look, or
    somebody else may, or where lr is 0 or may be: such a step has to leave every bit of the parameters as it is.
    """
    if type(base) not in _BLIND or has_hooks(base):
        return None
    decays = []
    for group in base.param_groups:
        lr, decay = group["lr"], group.get("weight_decay", 0.0)
        is_decoupled = type(base) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
        if isinstance(lr, Tensor) or isinstance(decay, Tensor) or lr == 0 or (decay and not is_decoupled):
            return None
        decays.append(lr / group["mechanic_unit"] * decay)
    return decays
