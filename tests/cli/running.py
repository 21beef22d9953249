"""Run a command or a script in a process of its own, forked from this one: their imports take longer than they do."""

import os
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

import sklearn.datasets  # noqa: F401 - for the scripts
import torch._dynamo  # noqa: F401 - which torch imports when an optimizer first steps

from mechanic.cli import main

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT = 60  # seconds


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


def in_child(function, *, folder=None, **env):
    """Call a function in a forked process, with stdout and stderr in files."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os._exit(_call(function, out, err, folder, env))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read().decode(), err.read().decode())


def _call(function, out, err, folder, env):
    signal.alarm(TIMEOUT)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    os.chdir(folder or os.getcwd())
    os.environ.update(env)
    sys.path.insert(0, "")  # the command's own, which it replaces
    code = 0
    try:
        code = function() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        traceback.print_exc()
    return code


def mechanic(*arguments, folder=None, **env):
    """The command, as its console script calls it."""
    return in_child(lambda: main([str(argument) for argument in arguments]), folder=folder, **env)


def edited(name, *edits, folder):
    """A script after some edits, in a folder."""
    source = (SCRIPTS / f"{name}.py").read_text()
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = Path(folder, f"{name}_by_hand.py")
    path.write_text(source)
    return path


def by_hand(name, *edits, folder, arguments=(), **env):
    """A script after some edits, run as ``python`` would."""
    path = edited(name, *edits, folder=folder)

    def run():
        import runpy

        sys.argv = [str(path), *arguments]
        runpy.run_path(str(path), run_name="__main__")

    return in_child(run, folder=folder, **env)
