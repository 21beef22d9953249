"""``mechanic run``: run a script as Python would, with its optimizers wrapped."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import io
import os
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from mechanic.cli import wrapping
from mechanic.cli.settings import Settings
from mechanic.config import TunerConfig


def run(script: str, arguments: list[str], settings: Settings, *, is_module: bool = False) -> None:
    """Run it to its end. What it raises is raised here, so that the exit code is the script's own."""
    try:
        TunerConfig.of(settings.config)
    except (TypeError, ValueError) as error:
        _refuse(f"--config: {error}")
    if settings.log:
        if not settings.log.endswith((".jsonl", ".csv")):
            _refuse(f"--log-to writes a .jsonl or a .csv file, got {settings.log}")
        log = os.path.abspath(settings.log)  # the script may change the folder
        if not os.path.isdir(os.path.dirname(log)):
            _refuse(f"--log-to: there is no folder {os.path.dirname(log)}")
        settings = dataclasses.replace(settings, log=log)
    if script.endswith(".ipynb"):
        _refuse(f"{script} is a notebook, and run takes scripts; wrap the optimizer in a cell: Mechanic(optimizer)")
    if not is_module and not os.path.isfile(script):
        _refuse(f"there is no file {script}" + ("; for a module, write -m" if not script.endswith(".py") else ""))
    session = wrapping.start(settings)
    try:
        if is_module:
            _run_module(script, arguments)
        else:
            _run_file(script, arguments)
    except wrapping.ProbeIsDone:
        session.report()
    except BaseException as error:
        ends_well = isinstance(error, SystemExit) and not error.code  # by sys.exit(main())
        session.report(even_if_nothing=ends_well)
        if not isinstance(error, SystemExit):
            sys.excepthook = _without_our_frames(sys.excepthook)
        raise
    else:
        session.report()


def _refuse(message: str) -> NoReturn:
    print(f"mechanic: {message}", file=sys.stderr)
    raise SystemExit(2)


def _run_file(script: str, arguments: list[str]) -> None:
    path = os.path.abspath(script)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)  # not this file's __future__
    # It stays __main__ until the process ends: pickles, atexit functions and processes to be spawned look it up.
    module = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(module).update(__file__=path, __builtins__=__builtins__, __cached__=None, __loader__=loader, __spec__=None)
    sys.modules["__main__"] = module
    sys.argv = [script, *arguments]
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    exec(code, vars(module))


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    _set_first_path(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _set_first_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # python -P leaves the script's folder out
        sys.path[0] = folder


def _without_our_frames(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let a traceback begin in the script, as it does under ``python``."""

    def show(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> Any:
        first = traceback
        while first is not None and _is_ours(first.tb_frame):
            first = first.tb_next
        if first is None and not isinstance(error, SyntaxError):  # of the script itself, which has no frame yet
            first = traceback
        return hook(kind, error.with_traceback(first), first)  # Python's own hook shows that of the error

    return show


def _is_ours(frame: types.FrameType) -> bool:
    file = os.path.basename(frame.f_code.co_filename)
    spec_name = getattr(frame.f_globals.get("__spec__"), "name", "")
    is_mechanic = any(str(n).partition(".")[0] == "mechanic" for n in (frame.f_globals.get("__name__"), spec_name))
    return is_mechanic or file in ("mechanic", "runpy.py", "<frozen runpy>")  # the first is the console script
