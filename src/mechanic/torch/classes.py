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

from mechanic.torch.optimizer import BaseT, Mechanic
from mechanic.tuner import TunerConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _MechanizedType(type):
    """The type of the classes :func:`mechanize` makes; it pickles them by their base class."""

    base_class: type[Optimizer]


class Mechanized(Mechanic[BaseT]):
    """What the classes of this module share: they build their base from its arguments."""

    base_class: type[BaseT]

    def __init__(
        self,
        params: ParamsT,
        *args: Any,
        config: TunerConfig | Mapping[str, Any] | None = None,
        unit: float | None = None,
        per_group: bool = False,
        skip_nonfinite: bool = False,
        own_iterates: bool = False,
        process_group: ProcessGroup | None = None,
        compile: bool = False,  # noqa: A002
        **kwargs: Any,
    ) -> None:
        super().__init__(
            self.base_class(params, *args, **kwargs),
            config=config,
            unit=unit,
            per_group=per_group,
            skip_nonfinite=skip_nonfinite,
            own_iterates=own_iterates,
            process_group=process_group,
            compile=compile,
        )


def mechanize(base_class: type[BaseT]) -> type[Mechanized[BaseT]]:
    """Make a class whose instances are ``Mechanic(base_class(params, ...))``.

    Mechanic's arguments (``config=``, ``unit=``, ``per_group=``, ``skip_nonfinite=``, ``own_iterates=``,
    ``process_group=`` and ``compile=``) go to Mechanic, all others to the base. Called twice with one base it returns
    the same class, and classes and instances pickle.

    Example:
        >>> import torch
        >>> from mechanic.torch import Mechanic, mechanize
        >>> optimizer = mechanize(torch.optim.RAdam)([torch.nn.Parameter(torch.ones(2))], config={"decay": 0.1})
        >>> isinstance(optimizer, Mechanic), type(optimizer.base).__name__
        (True, 'RAdam')
    """
    if not (inspect.isclass(base_class) and issubclass(base_class, Optimizer)):
        kind = base_class.__name__ if inspect.isclass(base_class) else f"an instance of {type(base_class).__name__}"
        raise TypeError(f"mechanize takes an optimizer class, got {kind}; wrap an instance with Mechanic(...)")
    if issubclass(base_class, Mechanic):
        raise TypeError(f"{base_class.__name__} is a Mechanic already; use it as it is, or mechanize its base's class")
    cls: Any = base_class
    made: Any = _WRITTEN_OUT.get(cls) or _mechanized(cls)
    return made  # type: ignore[no-any-return]


@functools.cache
def _mechanized(base_class: Any) -> _MechanizedType:
    namespace = {
        "__doc__": f"Mechanic around {base_class.__name__}; see :func:`mechanize`.",
        "__module__": "mechanic.torch",
        "__signature__": _joined_signature(base_class),
        "base_class": base_class,
    }
    return _MechanizedType(f"Mechanic{base_class.__name__}", (Mechanized,), namespace)


def _joined_signature(base_class: type[Optimizer]) -> inspect.Signature:
    """The base's arguments and Mechanic's: trainers filter what they pass by the signature."""
    base = inspect.signature(base_class)
    own = [p for p in inspect.signature(Mechanized.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    parameters = sorted([*base.parameters.values(), *own], key=lambda p: p.kind)
    return base.replace(parameters=parameters)


def _reduce_class(cls: _MechanizedType) -> str | tuple[Any, ...]:
    if "base_class" not in vars(cls):
        return cls.__qualname__  # a subclass, importable under its own name
    return mechanize, (cls.base_class,)


copyreg.pickle(_MechanizedType, _reduce_class)


class MechanicAdamW(Mechanized[AdamW]):
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
        config: TunerConfig | Mapping[str, Any] | None = None,
        unit: float | None = None,
        per_group: bool = False,
        skip_nonfinite: bool = False,
        own_iterates: bool = False,
        process_group: ProcessGroup | None = None,
        compile: bool = False,  # noqa: A002
    ) -> None:
        super().__init__(**_passed_on(locals()))


class MechanicSGD(Mechanized[SGD]):
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
        config: TunerConfig | Mapping[str, Any] | None = None,
        unit: float | None = None,
        per_group: bool = False,
        skip_nonfinite: bool = False,
        own_iterates: bool = False,
        process_group: ProcessGroup | None = None,
        compile: bool = False,  # noqa: A002
    ) -> None:
        super().__init__(**_passed_on(locals()))


_WRITTEN_OUT = {AdamW: MechanicAdamW, SGD: MechanicSGD}  # for type checkers and editors


def _passed_on(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an ``__init__``, from its ``locals()``."""
    return {name: value for name, value in arguments.items() if name not in ("self", "__class__")}
