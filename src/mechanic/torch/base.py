"""The base optimizer: which ones can be wrapped, what is known of them, and what one sees while it steps."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from mechanic.torch.delta import dtype_of_delta, working_dtype
from mechanic.torch.layout import PEAK_LR, RESIDUAL, STATE_KEYS, Group, StateDict, is_half_precision
from mechanic.torch.lists import Start
from mechanic.torch.together import NOT_TAKEN_OVER, act, members_of, owners_of, stand_in, take_over

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
    if len({getattr(member, "maximize", False) for member in members_of(base)}) > 1:
        raise ValueError("one of the optimizers has maximize=True and another has not; build them alike")
    if any("mechanic_format" in group for group in base.param_groups):
        raise ValueError(
            f"this {type(base).__name__} is already wrapped, or was loaded from a Mechanic's checkpoint; "
            "wrap a new one, and load the checkpoint into the Mechanic"
        )
    if any(group.get("differentiable") for group in base.param_groups):
        raise ValueError("Mechanic cannot differentiate through its step; build the base without differentiable=True")


def keeps_own_iterates(base: Optimizer) -> bool:
    """Whether the base is known to keep iterates beside the parameters: scaling the parameters would separate them."""
    return any(
        (callable(getattr(member, "train", None)) and callable(getattr(member, "eval", None)))  # Schedule-Free
        or any(cls.__name__ in _WITH_OWN_ITERATES for cls in type(member).__mro__)
        for member in members_of(base)
    )


def has_method(base: Optimizer, name: str) -> bool:
    """Whether the base, or one of its optimizers, has ``train`` or ``eval`` (Schedule-Free)."""
    return any(hasattr(member, name) for member in members_of(base))


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


def _of_torch(*names: str) -> set[Any]:
    return {getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)}


_KNOWN = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop")

_IGNORES_VALUES = _of_torch(*_KNOWN)
"""Bases whose update does not depend on the parameter values, but for weight decay."""

_LINEAR_IN_LR = _of_torch(*_KNOWN, "Muon") - _of_torch("Rprop")
"""Bases of torch's whose update is proportional to lr."""

_TAKES_BFLOAT16 = _of_torch("SGD", "Adam", "AdamW")
"""Bases that were measured to train as well with state in bfloat16 as in float32; see docs/memory.md. Not a fused SGD,
which leaves most elements of such parameters where they are on a CPU (torch 2.13)."""

_LOW_BIT = {
    *(f"torchao.optim.adam.{name}" for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    *(f"bitsandbytes.optim.adamw.{name}" for name in ("AdamW8bit", "PagedAdamW8bit")),
    *(f"bitsandbytes.optim.lion.{name}" for name in ("Lion8bit", "PagedLion8bit")),
}
"""Bases with state in few bits, whose update does not depend on the values but for a decoupled weight decay."""

_ALSO_LINEAR_IN_LR = {
    f"pytorch_optimizer.optimizer.{n}" for n in ("adan.Adan", "adopt.ADOPT", "lamb.Lamb", "lion.Lion")
}
"""Bases of others of which the same is known."""

_ONE_BY_ONE = {
    *(f"pytorch_optimizer.optimizer.{name}" for name in ("adan.Adan", "adopt.ADOPT", "lion.Lion", "soap.SOAP")),
    *(f"schedulefree.{name}_schedulefree.{cls}ScheduleFree" for name, cls in (("adamw", "AdamW"), ("sgd", "SGD"))),
}
"""Bases of others that step every parameter by itself, as all of torch's do and those with state in few bits."""


def _path(base: Optimizer) -> str:
    return f"{type(base).__module__}.{type(base).__qualname__}"


def _is_of_torch(base: Optimizer) -> bool:
    return type(base).__module__.split(".")[:2] == ["torch", "optim"]


def is_linear_in_lr(base: Optimizer) -> bool:
    """Whether the base is known to take steps proportional to lr, so that S can be multiplied into lr."""
    known, steps = _LOW_BIT | _ALSO_LINEAR_IN_LR, {inspect.unwrap(cls.step) for cls in _LINEAR_IN_LR}
    return all(inspect.unwrap(type(each).step) in steps or _path(each) in known for each in members_of(base))


def steps_one_by_one(base: Optimizer) -> bool:
    """Whether the base is known to make the same step if it is shown its parameters one after the other."""
    return all(_is_of_torch(member) or _path(member) in _LOW_BIT | _ONE_BY_ONE for member in members_of(base))


def starts_of(
    base: Optimizer, groups: list[Group], delta: torch.dtype | str | None, *, own_iterates: bool
) -> Callable[[int, torch.dtype], Start]:
    """Where a base starts from, by the index of the param group and the dtype of the parameter.

    Args:
        base: the base.
        groups: its param groups, or what they held when the step began.
        delta: what Delta is kept in, as a user says it.
        own_iterates: whether the base steps on x_1 + Delta.
    """
    owners = owners_of(base)

    @lru_cache(None)
    def start(index: int, dtype: torch.dtype) -> Start:
        group, owner, wide = groups[index], owners[index], working_dtype(dtype)
        sign = -1.0 if group.get("maximize", getattr(owner, "maximize", False)) else 1.0
        if own_iterates:
            return Start("own", wide, sign)
        low_bit = _path(owner) in _LOW_BIT
        is_coded = dtype_of_delta(dtype, delta) != wide
        takes_bfloat16 = low_bit or (type(owner) in _TAKES_BFLOAT16 and not (type(owner) is SGD and group.get("fused")))
        seen = dtype if is_coded and dtype == torch.bfloat16 and takes_bfloat16 else wide
        lr, decay = group.get("lr", 1.0), group.get("weight_decay", 0.0)
        if low_bit and isinstance(lr, Tensor) and lr.device.type == "cpu":
            lr = float(lr)  # torchao makes a tensor of any
        decouples = low_bit or type(owner) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
        has_no_tensor = not isinstance(lr, Tensor) and not isinstance(decay, Tensor)
        ignores_values = low_bit or type(owner) in _IGNORES_VALUES
        # At zero u is exact. Beside x the last digits of a small u would be lost.
        if ignores_values and has_no_tensor and (decouples or not decay):
            return Start("zero", seen, sign, lr / group[PEAK_LR] * decay)
        return Start("x", wide, sign)

    return start


def seen_dtypes(base: Optimizer, delta: torch.dtype | str | None, *, own_iterates: bool) -> dict[Tensor, torch.dtype]:
    """The dtypes in which a base sees its parameters, and so makes its state."""
    groups = base.param_groups
    start_of = starts_of(base, groups, delta, own_iterates=own_iterates)
    return {p: start_of(index, p.dtype).dtype for index, group in enumerate(groups) for p in group["params"]}


class View:
    """A base as it was when this was made, and sees other tensors in place of its parameters.

    The base itself changes only once a call was made. Every call in one step starts from what the base's groups and
    attributes held before the step, since some bases count their steps there.
    """

    def __init__(self, base: Optimizer) -> None:
        self._base = base
        self._groups = [(group, dict(group)) for group in base.param_groups]
        items = vars(base).items()
        self._attributes = {k: v for k, v in items if k not in NOT_TAKEN_OVER and not isinstance(v, Optimizer)}

    @property
    def groups(self) -> list[Group]:
        """What the base's groups held."""
        return [held for _, held in self._groups]

    def act(self, seen: Mapping[Tensor, Tensor], method: str) -> None:
        """Let a stand-in for the base ``step``, or call its ``train`` or ``eval``.

        It has these tensors with their gradients, and no others. For a step it has no empty groups.
        """
        groups, counted = [], []
        for group, held in self._groups:
            params = [seen[p] for p in held["params"] if p in seen]
            if params or method != "step":
                relative = {} if held.get("lr") is None else {"lr": held["lr"] / held[PEAK_LR]}
                own = {key: value for key, value in held.items() if not key.startswith("mechanic_")}
                groups.append({**own, **relative, "params": params})
                counted.append((group, held, dict(groups[-1])))
        base: Any = self._base
        shown = stand_in(base, groups, lambda optimizer: self._state_for(optimizer, seen))
        vars(shown).update(self._attributes)
        act(shown, method)
        _keep_state(shown, base, seen)
        take_over(shown, base)
        for found, (group, held, before) in zip(groups, counted, strict=True):
            for key, value in found.items():
                if key not in ("params", "lr") and value is not before.get(key) and group.get(key) is held.get(key):
                    group[key] = value

    def _state_for(self, optimizer: Optimizer, seen: Mapping[Tensor, Tensor]) -> Any:
        """The state of an optimizer for what it sees. It initialises what is empty, so it must not see our entries."""
        found: Any = defaultdict(dict)
        found.update((key, entry) for key, entry in optimizer.state.items() if not isinstance(key, Tensor))
        for p, tensor in seen.items():
            kept = optimizer.state.get(p, {})
            entry = {key: value for key, value in kept.items() if key not in STATE_KEYS}
            if (is_half_precision(p.dtype) or RESIDUAL in kept) and _path(optimizer) not in _LOW_BIT:
                # It was made before this base was wrapped, with another weight decay, or before p was cast to float32.
                for key, value in entry.items():
                    is_like = isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
                    if is_like and key != "step":
                        entry[key] = value.to(tensor.dtype)
            if entry:
                found[tensor] = entry
        return found


def load(base: Any, state_dict: StateDict, dtypes: Mapping[Tensor, torch.dtype]) -> None:
    """Let a stand-in for a base load, with parameters in the dtypes that it steps on, which torch casts state to."""
    seen = {p: torch.empty(0, dtype=dtype, device=p.device) if dtype != p.dtype else p for p, dtype in dtypes.items()}
    groups = [{**group, "params": [seen[p] for p in group["params"]]} for group in base.param_groups]
    shown = stand_in(base, groups, lambda _: defaultdict(dict))
    shown.load_state_dict(state_dict)
    originals = {tensor: p for p, tensor in seen.items()}
    pairs = zip(shown.param_groups, base.param_groups, strict=True)
    loaded = [{**group, "params": former["params"]} for group, former in pairs]
    for index, (saved, owner) in enumerate(zip(state_dict["param_groups"], owners_of(base), strict=True)):
        former, group = base.param_groups[index], loaded[index]
        for key in sorted(owner.defaults.keys() & former.keys() - saved.keys()):
            if key not in group or group[key] != former[key]:  # unless the base fills it in
                raise ValueError(f"param_groups[{index}] of the checkpoint has no {key!r}; is it of another optimizer?")
    state = {originals.get(key, key) if isinstance(key, Tensor) else key: entry for key, entry in shown.state.items()}
    take_over(shown, base)
    base.param_groups, base.state = loaded, defaultdict(dict, state)


def _keep_state(shown: Any, base: Any, seen: Mapping[Tensor, Tensor]) -> None:
    """Put what a stand-in has made of its state beside ours."""
    for name, value in vars(base).items():
        if isinstance(value, Optimizer):
            _keep_state(vars(shown)[name], value, seen)
    originals = {tensor: p for p, tensor in seen.items()}
    for key, entry in shown.state.items():
        p = originals.get(key) if isinstance(key, Tensor) else None
        if p is not None and entry:
            base.state[p].update(entry)
        elif p is None:
            base.state[key] = entry
