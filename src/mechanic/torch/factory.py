"""Mechanic as a class that builds its base: for trainers that are configured with a class, and Muon with AdamW."""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from mechanic.torch.optimizer import Mechanic
from mechanic.torch.roles import Roles, roles
from mechanic.torch.together import Together

BaseT = TypeVar("BaseT", bound=Optimizer)


class _MechanicType(type):
    """The type of the classes that :func:`mechanic_class` makes; it pickles them by their base class."""


class MechanicOf(Mechanic[BaseT]):
    """What the classes of this module share: they build their base from its arguments."""

    base_class: type[BaseT]
    own_options: frozenset[str]  # that the base does not have as well

    def __init__(self, params: ParamsT, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in self.own_options & kwargs.keys()}
        super().__init__(self.base_class(params, *args, **kwargs), **options)


def mechanic_class(base_class: type[BaseT]) -> type[MechanicOf[BaseT]]:
    """Make a class whose instances are ``Mechanic(base_class(params, ...))``.

    Use it if a trainer asks for a class: ``optimizer_class=RAdam`` becomes ``optimizer_class=mechanic_class(RAdam)``.
    The options of :class:`Mechanic` (``config=``, ``peak_lr=``, ``per_group=``, ``skip_nonfinite=``, ``own_iterates=``,
    ``process_group=`` and ``delta=``) go to Mechanic, all others to the base, and so do those that the base has as well
    (AdamP has a ``delta=``). If it is called twice with one base it
    returns the same class. Classes and instances pickle.

    Example:
        >>> import torch
        >>> from mechanic.torch import Mechanic, mechanic_class
        >>> optimizer = mechanic_class(torch.optim.RAdam)([torch.nn.Parameter(torch.ones(2))], config={"decay": 0.1})
        >>> isinstance(optimizer, Mechanic), type(optimizer.base).__name__
        (True, 'RAdam')
    """
    if not (inspect.isclass(base_class) and issubclass(base_class, Optimizer)):
        kind = base_class.__name__ if inspect.isclass(base_class) else f"an instance of {type(base_class).__name__}"
        raise TypeError(f"mechanic_class takes an optimizer class, got {kind}; wrap an instance with Mechanic(...)")
    if issubclass(base_class, Mechanic):
        raise TypeError(f"{base_class.__name__} is a Mechanic already; use it as it is, or pass its base's class")
    cls: Any = base_class
    return cast(type[MechanicOf[BaseT]], _make_class(cls))


@functools.cache
def _make_class(base_class: Any) -> Any:
    base = inspect.signature(base_class)
    options = [p for p in inspect.signature(Mechanic.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    own = [p for p in options if p.name not in base.parameters]
    joined = sorted([*base.parameters.values(), *own], key=lambda p: p.kind)
    namespace = {
        "__doc__": f"Mechanic around {base_class.__name__}; see :func:`mechanic_class`.",
        "__module__": "mechanic.torch",
        "__signature__": base.replace(parameters=joined),  # trainers filter what they pass by it
        "base_class": base_class,
        "own_options": frozenset(p.name for p in own),
    }
    return _MechanicType(f"Mechanic{base_class.__name__}", (MechanicOf,), namespace)


def _reduce_class(cls: Any) -> str | tuple[Any, ...]:
    if "base_class" not in vars(cls):
        return str(cls.__qualname__)  # a subclass, importable under its own name
    return mechanic_class, (cls.base_class,)


copyreg.pickle(_MechanicType, _reduce_class)


MechanicAdamW = mechanic_class(AdamW)
MechanicSGD = mechanic_class(SGD)


class MechanicMuon(Mechanic[Together]):
    """``torch.optim.Muon`` for the matrices of a model, AdamW for all else, and no learning rates.

    ``MechanicMuon(model)`` is ``Mechanic(Together(Muon(matrices), AdamW(rest)))``, with one param group per role of
    :func:`mechanic.torch.roles`. Only the role ``matrix`` goes to Muon, which takes 2-dim parameters only.

    Args:
        model: whose parameters to train, all of them. It is the model, not its parameters: names and modules tell
            which parameter does what.
        lr: the learning rate that counts as 1, for both. Its size does not matter.
        weight_decay: of both.
        momentum: of Muon.
        nesterov: of Muon.
        ns_steps: of Muon: how often it iterates to make an update orthogonal.
        adjust_lr_fn: of Muon: how its step grows with a matrix. The default gives it the size of AdamW's, so that one
            tuner can serve both.
        betas: of AdamW.
        eps: of AdamW.
        roles: roles by patterns of names where you want others, as ``{"*.router.weight": "vector"}``; or what
            :func:`mechanic.torch.roles` has returned. Parameters of the role ``other`` are refused by name.
        tuners: ``"one"`` for all, or one for every ``"role"``.
        options: those of :class:`Mechanic`.

    Example:
        >>> import torch
        >>> from mechanic.torch import MechanicMuon
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = MechanicMuon(model)  # doctest: +SKIP
        >>> [(group["optimizer"], group["role"]) for group in optimizer.param_groups]  # doctest: +SKIP
        [('Muon', 'matrix'), ('AdamW', 'head'), ('AdamW', 'vector')]
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1.0,
        weight_decay: float = 0.01,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        roles: Mapping[str, str] | Roles | None = None,
        tuners: Literal["one", "role"] = "one",
        **options: Any,
    ) -> None:
        if tuners not in ("one", "role"):
            raise ValueError(f"tuners must be 'one' or 'role', got {tuners!r}")
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(f"MechanicMuon needs a torch from 2.9 on, which has Muon; this is {torch.__version__}")
        groups = _groups(model, roles, name_tuners=tuners == "role")
        muon = torch.optim.Muon(
            [groups.pop("matrix")],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        rest = list(groups.values())
        adamw = [AdamW(rest, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)] if rest else []
        super().__init__(Together(muon, *adamw), **options)


def _groups(model: nn.Module, wanted: Mapping[str, str] | Roles | None, *, name_tuners: bool) -> dict[str, Any]:
    """The param groups by role. Muon takes the one of the role ``matrix``."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"MechanicMuon takes the model, not its parameters, got {type(model).__name__}")
    found = wanted if isinstance(wanted, Roles) else roles(model, wanted)
    if others := [name for name, p in found["other"].items() if p.requires_grad]:
        raise ValueError(
            f"what these parameters do is not known: {', '.join(others)}; say it, for example with "
            f"MechanicMuon(model, roles={{{others[0]!r}: 'vector'}})"
        )
    listed = {p for named in found.values() for p in named.values()}
    if strangers := [name for name, p in model.named_parameters() if p.requires_grad and p not in listed]:
        count, first = len(strangers), strangers[0]
        raise ValueError(f"the roles are of another model: they lack {first}, {count} in all; use roles(model)")
    for name, p in found["matrix"].items():
        if p.ndim != 2 or p.is_complex():
            kind = f"{p.ndim} dimensions" if p.ndim != 2 else "complex numbers"
            raise ValueError(f"{name} has {kind}, which Muon does not take: give it another role than 'matrix'")
    if not found["matrix"]:
        raise ValueError(
            "the model has no matrices, so there is nothing for Muon; use MechanicAdamW. If FullyShardedDataParallel "
            "has made flat parts of them, shard with fully_shard, whose parts Muon can gather, or use DDP"
        )
    groups = {role: {"params": list(named.values()), "role": role} for role, named in found.items() if named}
    if name_tuners:
        groups = {role: {**group, "tuner": role} for role, group in groups.items()}
    return groups
