"""Wrap every optimizer that a script builds, without changing the script.

``Optimizer.__new__`` is replaced. It builds the optimizer that was asked for and returns a Mechanic around it, on which
Python then does not call ``__init__`` again. No class is replaced, so ``from torch.optim import AdamW``, subclasses and
``isinstance`` work as ever.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import multiprocessing.spawn
import multiprocessing.util
import os
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mechanic.cli.session import ProbeIsDone, Session
from mechanic.cli.settings import Settings

__all__ = ["ProbeIsDone", "start"]

_OPTIMIZERS = "torch.optim.optimizer"  # the module that defines Optimizer


def start(settings: Settings) -> Session:
    """From now on, wrap what is built, here and in processes that are spawned from here."""
    session = Session(settings)
    if _OPTIMIZERS in sys.modules:
        _replace_new(sys.modules[_OPTIMIZERS], session)
    else:
        # Not imported here: a script may set OMP_NUM_THREADS and the like before it imports torch.
        sys.meta_path.insert(0, _WhenImported(session))
    _reach_spawned_processes(session)
    _reach_forked_processes(session)
    return session


class _WhenImported(importlib.abc.MetaPathFinder):
    """Replaces ``Optimizer.__new__`` as soon as torch defines it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: types.ModuleType) -> None:
                execute(module)
                _replace_new(module, self._session)

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


class _Nesting(threading.local):
    """Whether an optimizer is being built: those that it builds for itself are its own affair."""

    is_building = False


@contextmanager
def _building(nesting: _Nesting) -> Iterator[None]:
    nesting.is_building = True
    try:
        yield
    finally:
        nesting.is_building = False


def _replace_new(module: types.ModuleType, session: Session) -> None:
    optimizer_class: Any = module.__dict__["Optimizer"]
    nesting = _Nesting()

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        is_wrapper = any(isinstance(value, optimizer_class) for value in (*args, *kwargs.values()))
        # Without arguments it is a copy or an unpickled one. Accelerate's optimizer is around another.
        is_new = bool(args or kwargs) and not is_wrapper and not nesting.is_building
        if not is_new or _is_in("mechanic", caller) or issubclass(cls, _mechanic_classes()):
            return object.__new__(cls)
        with _building(nesting):
            base = object.__new__(cls)
            base.__init__(*args, **kwargs)
            reason = _reason_to_leave(cls, caller, session.settings)
            if reason is None:
                try:
                    optimizer = _wrap(base, session.settings)
                except (TypeError, ValueError) as error:
                    reason = str(error)
                else:
                    return session.watch(optimizer, caller, args, kwargs)
        session.announce_left(cls, caller, reason)
        return _initialized(base)

    optimizer_class.__new__ = staticmethod(new)


def _mechanic_classes() -> tuple[type, ...]:
    """Mechanic, which is no optimizer to wrap; none while it is not imported."""
    module = sys.modules.get("mechanic.torch.optimizer")
    return (module.Mechanic,) if module is not None and hasattr(module, "Mechanic") else ()


def _reason_to_leave(cls: type, caller: types.FrameType, settings: Settings) -> str | None:
    if settings.only and not {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"} & set(settings.only):
        return "--only names others"
    if _is_in("torch.distributed", caller) or cls.__module__.startswith("torch.distributed"):
        return "it holds the part of one rank; build Mechanic in the script, with process_group="
    return None


def _is_in(package: str, frame: types.FrameType) -> bool:
    return f"{frame.f_globals.get('__name__')}.".startswith(f"{package}.")


def _wrap(base: Any, settings: Settings) -> Any:
    from mechanic.cli.disguise import Disguised
    from mechanic.torch import Mechanic

    optimizer = Mechanic(base, config=settings.config, per_group=settings.per_group)
    optimizer.__class__ = Disguised
    return optimizer


def _initialized(base: Any) -> Any:
    """Return an optimizer from ``__new__`` without a second ``__init__``, which would find its iterators used up."""
    cls = type(base)

    def become(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = cls

    base.__class__ = type(cls.__name__, (cls,), {"__init__": become, "__module__": cls.__module__})
    return base


class _Start:
    """Starts a session where it is unpickled."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __reduce__(self) -> tuple[Any, ...]:
        return _start_in_spawned_process, (self._settings,)


def _start_in_spawned_process(settings: Settings) -> None:
    atexit.register(start(settings).report, even_if_nothing=False)


def _reach_spawned_processes(session: Session) -> None:
    """Send the settings along. A spawned process unpickles this dict before anything else, and skips unknown keys."""
    former = multiprocessing.spawn.get_preparation_data

    @functools.wraps(former)
    def with_settings(name: str) -> dict[str, Any]:
        session.has_spawned = True
        return {**former(name), "mechanic": _Start(session.settings)}

    multiprocessing.spawn.get_preparation_data = with_settings


def _reach_forked_processes(session: Session) -> None:
    """They are copies of this one, and end without its atexit functions."""

    def begin(session: Session) -> None:
        session.begin_in_forked_process()
        multiprocessing.util.Finalize(session, session.report, kwargs={"even_if_nothing": False}, exitpriority=0)

    def note() -> None:
        session.has_spawned = True

    multiprocessing.util.register_after_fork(session, begin)
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_parent=note)
