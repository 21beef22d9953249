"""Mechanic as a class that takes ``(params, **kwargs)``, for trainers that are configured with a class."""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from mechanic.torch.optimizer import Mechanic
from mechanic.tuner import TunerConfig


class _MechanizedType(type):
    """The type of the classes :func:`mechanize` makes; it pickles them by their base class."""

    base_class: type[Optimizer]


@functools.cache
def mechanize(base_class: type[Optimizer]) -> type[Mechanic]:
    """Make a class whose instances are ``Mechanic(base_class(params, ...))``.

    ``config=`` takes a :class:`mechanic.TunerConfig` or a dict of its fields; it, ``per_group=``,
    ``skip_nonfinite=``, ``own_iterates=`` and ``compile=`` are Mechanic's, all other arguments go to the base. Called
    twice with one base it returns the same class, and classes and instances pickle.

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

    def init(
        self: Mechanic,
        params: ParamsT,
        *args: Any,
        config: TunerConfig | Mapping[str, Any] | None = None,
        per_group: bool = False,
        skip_nonfinite: bool = False,
        own_iterates: bool = False,
        compile: bool = False,  # noqa: A002
        **kwargs: Any,
    ) -> None:
        base = base_class(params, *args, **kwargs)
        Mechanic.__init__(
            self,
            base,
            config=config,
            per_group=per_group,
            skip_nonfinite=skip_nonfinite,
            own_iterates=own_iterates,
            compile=compile,
        )

    name = f"Mechanic{base_class.__name__}"
    doc = f"Mechanic around {base_class.__name__}; see :func:`mechanize`."
    namespace = {
        "__init__": init,
        "__doc__": doc,
        "__module__": "mechanic.torch",
        "__signature__": _joined_signature(init, base_class),
        "base_class": base_class,
    }
    return _MechanizedType(name, (Mechanic,), namespace)  # type: ignore[return-value]


def _joined_signature(init: Callable[..., None], base_class: type[Optimizer]) -> inspect.Signature:
    """The base's arguments and Mechanic's: trainers filter what they pass by the signature."""
    base = inspect.signature(base_class)
    own = [p for p in inspect.signature(init).parameters.values() if p.kind is p.KEYWORD_ONLY]
    parameters = sorted([*base.parameters.values(), *own], key=lambda p: p.kind)
    return base.replace(parameters=parameters)


def _reduce_class(cls: _MechanizedType) -> str | tuple[Any, ...]:
    if "base_class" not in vars(cls):
        return cls.__qualname__  # a subclass, importable under its own name
    return mechanize, (cls.base_class,)


copyreg.pickle(_MechanizedType, _reduce_class)

MechanicAdamW = mechanize(AdamW)
MechanicSGD = mechanize(SGD)
