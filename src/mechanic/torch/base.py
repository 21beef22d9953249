"""The base optimizer: which ones can be wrapped, what is known of them, and what one sees while it steps."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.delta import is_half_precision, working_dtype
from mechanic.torch.layout import PEAK_LR, STATE_KEYS, Group
from mechanic.torch.lists import Start
from mechanic.torch.private import is_fsdp1_parameter, step_hooks, step_without_hooks
from mechanic.torch.shards import is_split_too_far, like
from mechanic.torch.together import NOT_TAKEN_OVER, Together, members_of, owners_of, stand_in, take_over
from mechanic.torch.tuners import warn_user

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
    """A hook on the base that warns, once, if somebody steps the base instead of the Mechanic around it.

    Mechanic steps a stand-in without its hooks, and runs the hooks of others itself.
    """

    def __init__(self, base: Optimizer) -> None:
        self._has_warned = False
        self._handles = [each.register_step_pre_hook(self) for each in {base, *members_of(base)}]

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                f"the step() of {type(optimizer).__name__} was called directly, so its update was applied unscaled; "
                "call the step() of the Mechanic around it"
            )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def run_hooks(base: Optimizer, *, after: bool) -> None:
    """Run the hooks on the step of a base, those before it or those after it: once per step, whatever its parts."""
    for optimizer in dict.fromkeys((base, *members_of(base))):
        for hook in step_hooks(optimizer)[after]:
            if not isinstance(hook, DirectStepCheck):
                hook(optimizer, (optimizer,), {})


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
"""Bases that were measured to train as well with state in bfloat16 as in float32; see docs/memory.md."""

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


def is_linear_in_lr(base: Optimizer) -> bool:
    """Whether the base is known to take steps proportional to lr, so that S can be multiplied into lr."""
    known, steps = _LOW_BIT | _ALSO_LINEAR_IN_LR, {inspect.unwrap(cls.step) for cls in _LINEAR_IN_LR}
    return all(inspect.unwrap(type(each).step) in steps or _path(each) in known for each in members_of(base))


def steps_one_by_one(base: Optimizer) -> bool:
    """Whether the base is known to make the same step if it is shown its parameters one after the other."""
    return all(
        type(member).__module__.split(".")[:2] == ["torch", "optim"] or _path(member) in _LOW_BIT | _ONE_BY_ONE
        for member in members_of(base)
    )


def starts_of(base: Optimizer, *, own_iterates: bool) -> Callable[[Group, Optimizer, torch.dtype, bool], Start]:
    """Where a base starts from, by param group, its optimizer, dtype of the parameter and whether Delta is coded."""

    def start(group: Group, owner: Optimizer, dtype: torch.dtype, coded: bool) -> Start:
        wide = working_dtype(dtype)
        if own_iterates:
            return Start("own", wide)
        low_bit = _path(owner) in _LOW_BIT
        takes_bfloat16 = coded and dtype == torch.bfloat16 and (low_bit or type(owner) in _TAKES_BFLOAT16)
        seen = dtype if takes_bfloat16 else wide
        lr, decay = group.get("lr", 1.0), group.get("weight_decay", 0.0)
        if low_bit and isinstance(lr, Tensor) and lr.device.type == "cpu":
            lr = float(lr)  # torchao makes a tensor of any
        decouples = low_bit or type(owner) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
        has_no_tensor = not isinstance(lr, Tensor) and not isinstance(decay, Tensor)
        ignores_values = low_bit or type(owner) in _IGNORES_VALUES
        # At zero u is exact. Beside x the last digits of a small u would be lost.
        if seen == dtype and ignores_values and has_no_tensor and (decouples or not decay):
            return Start("zero", seen, lr / group[PEAK_LR] * decay)
        return Start("x", wide)

    return start


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

    def call(self, seen: Mapping[Tensor, Tensor], function: Callable[[Any], Any], *, all_groups: bool = False) -> None:
        """Call a function with a stand-in for the base that has these tensors with their gradients, and no others.

        It has no empty groups, unless it is to have ``all_groups``.
        """
        groups, counted = [], []
        for group, held in self._groups:
            params = [seen[p] for p in held["params"] if p in seen]
            if params or all_groups:
                relative = {} if held.get("lr") is None else {"lr": held["lr"] / held[PEAK_LR]}
                own = {key: value for key, value in held.items() if not key.startswith("mechanic_")}
                groups.append({**own, **relative, "params": params})
                counted.append((group, held, dict(groups[-1])))
        base: Any = self._base
        shown = stand_in(base, groups, lambda optimizer: _state_for(optimizer, seen))
        vars(shown).update(self._attributes)
        function(shown)
        _keep_state(shown, base, seen)
        take_over(shown, base)
        for found, (group, held, before) in zip(groups, counted, strict=True):
            for key, value in found.items():
                if key not in ("params", "lr") and value is not before.get(key) and group.get(key) is held.get(key):
                    group[key] = value


def step_of(optimizer: Any) -> None:
    """What a view calls for a step of the base."""
    optimizer.step_members() if isinstance(optimizer, Together) else step_without_hooks(optimizer)


def see(p: Tensor, data: Tensor) -> Tensor:
    """What a base sees in place of p: a tensor with other data, p's gradient in its dtype, and p's attributes."""
    seen = like(p, data).requires_grad_(p.requires_grad)
    if vars(p) and seen is data:
        vars(seen).update(vars(p))
    if p.grad is not None:
        seen.grad = p.grad if p.grad.dtype == seen.dtype else p.grad.to(seen.dtype)
    return seen


def _state_for(optimizer: Optimizer, seen: Mapping[Tensor, Tensor]) -> Any:
    """The state of an optimizer for what it sees. It initialises what is empty, so it must not see our entries."""
    found: Any = defaultdict(dict)
    found.update((key, entry) for key, entry in optimizer.state.items() if not isinstance(key, Tensor))
    for p, tensor in seen.items():
        if entry := {key: value for key, value in optimizer.state.get(p, {}).items() if key not in STATE_KEYS}:
            found[tensor] = _matching(optimizer, entry, p, tensor)
    return found


def _matching(optimizer: Optimizer, entry: dict[str, Any], p: Tensor, seen: Tensor) -> dict[str, Any]:
    """State of a half-precision parameter in the dtype that a base sees now: its weight decay may have been set."""
    if not is_half_precision(p.dtype) or any(type(each) not in _TAKES_BFLOAT16 for each in members_of(optimizer)):
        return entry
    return {
        key: value.to(seen.dtype)
        if isinstance(value, Tensor) and key != "step" and value.shape == p.shape and value.is_floating_point()
        else value
        for key, value in entry.items()
    }


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
