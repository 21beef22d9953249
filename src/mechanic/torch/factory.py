"""Mechanic as a class that takes ``(params, **kwargs)``, for trainers that are configured with a class."""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack  # which torch depends on

from mechanic.torch.optimizer import Mechanic, MechanicOptions
from mechanic.torch.wrapped import BaseT

if TYPE_CHECKING:
    pass


class _MechanicType(type):
    """The type of the classes that :func:`mechanic_class` makes; it pickles them by their base class."""

    base_class: type[Optimizer]


class MechanicOf(Mechanic[BaseT]):
    """What the classes of this module share: they build their base from its arguments."""

    base_class: type[BaseT]

    def __init__(self, params: ParamsT, *args: Any, **kwargs: Any) -> None:
        own = MechanicOptions.__annotations__.keys() - inspect.signature(self.base_class).parameters.keys()
        options = {name: kwargs.pop(name) for name in own & kwargs.keys()}
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
    made: Any = _WRITTEN_OUT.get(cls) or _make_class(cls)
    return made  # type: ignore[no-any-return]


@functools.cache
def _make_class(base_class: Any) -> _MechanicType:
    namespace = {
        "__doc__": f"Mechanic around {base_class.__name__}; see :func:`mechanic_class`.",
        "__module__": "mechanic.torch",
        "__signature__": _joined_signature(base_class),
        "base_class": base_class,
    }
    return _MechanicType(f"Mechanic{base_class.__name__}", (MechanicOf,), namespace)


def _joined_signature(base_class: type[Optimizer]) -> inspect.Signature:
    """The base's arguments and Mechanic's: trainers filter what they pass by the signature."""
    base = inspect.signature(base_class)
    options = inspect.signature(Mechanic.__init__).parameters.values()
    own = [p for p in options if p.kind is p.KEYWORD_ONLY and p.name not in base.parameters]
    parameters = sorted([*base.parameters.values(), *own], key=lambda p: p.kind)
    return base.replace(parameters=parameters)


def _show_all_options(init: Any, base_class: type[Optimizer]) -> None:
    """Let ``inspect.signature`` list Mechanic's options one by one, where the code has ``**options``."""
    own = next(iter(inspect.signature(init).parameters.values()))  # self
    joined = _joined_signature(base_class)
    init.__signature__ = joined.replace(parameters=[own, *joined.parameters.values()])


def _reduce_class(cls: _MechanicType) -> str | tuple[Any, ...]:
    if "base_class" not in vars(cls):
        return cls.__qualname__  # a subclass, importable under its own name
    return mechanic_class, (cls.base_class,)


copyreg.pickle(_MechanicType, _reduce_class)


class MechanicAdamW(MechanicOf[AdamW]):
    """``Mechanic(torch.optim.AdamW(params, ...))`` as a class: the arguments of both."""

    base_class = AdamW

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[MechanicOptions],
    ) -> None:
        super().__init__(**_passed_on(locals()), **options)


class MechanicSGD(MechanicOf[SGD]):
    """``Mechanic(torch.optim.SGD(params, ...))`` as a class: the arguments of both."""

    base_class = SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[MechanicOptions],
    ) -> None:
        super().__init__(**_passed_on(locals()), **options)


_show_all_options(MechanicAdamW.__init__, AdamW)
_show_all_options(MechanicSGD.__init__, SGD)
_WRITTEN_OUT = {AdamW: MechanicAdamW, SGD: MechanicSGD}  # for type checkers and editors


def _passed_on(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an ``__init__``, from its ``locals()``."""
    return {name: value for name, value in arguments.items() if name not in ("self", "__class__", "options")}
