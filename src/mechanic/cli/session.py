"""What happens around the optimizers of one ``mechanic run``: announce them, count, log, stop, report."""

from __future__ import annotations

import csv
import functools
import json
import os
import sys
import types
from typing import IO, TYPE_CHECKING, Any

from mechanic.cli.settings import Settings

if TYPE_CHECKING:
    from mechanic.cli.watched import Watched  # imports torch, which the script does first


_DESCRIBED = 8  # optimizers at the end


class ProbeIsDone(SystemExit):
    """Ends the script. ``except Exception`` in a training loop does not catch it."""


class Session:
    """All that ``mechanic run`` does besides running the script."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.watched: list[Watched] = []
        self.left: list[str] = []
        self.has_spawned = False  # processes, which report for themselves
        self._said: set[str] = set()
        self._rank: int | None = None  # known once there was a step
        self._log: _Log | None = None

    def watch(self, optimizer: Any, caller: types.FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Announce a wrapped optimizer, and follow its steps."""
        from mechanic.cli.watched import Watched

        watched = Watched(optimizer, _place(caller), args, kwargs)
        self.watched.append(watched)
        parameters = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        count = len(optimizer.param_groups)
        groups = f"{count} groups, " if count > 1 else ""
        what = f"wrapped {watched.cls.__name__} at {watched.place}"
        self._say_once(what, f"{what} ({groups}{parameters:,} parameters)")
        optimizer.register_step_pre_hook(functools.partial(self._before_step, watched))
        optimizer.register_step_post_hook(functools.partial(self._after_step, watched))
        return optimizer

    def announce_left(self, cls: type, caller: types.FrameType, reason: str) -> None:
        self.left.append(cls.__name__)
        what = f"left {cls.__name__} at {_place(caller)} as it is: {reason}"
        self._say_once(what, what)

    def report(self, *, even_if_nothing: bool = True) -> None:
        """Say what was learned, if something was."""
        if self._log is not None:
            self._log.close()
        trained = [watched for watched in self.watched if watched.steps]
        if trained:
            from mechanic.cli.answer import describe

            for index, watched in enumerate(trained[:_DESCRIBED]):
                self._say(describe(watched), blank=index == 0)
            if len(trained) > _DESCRIBED:
                self._say(f"and {len(trained) - _DESCRIBED} more optimizers")
            if self._log is not None:
                where = os.path.relpath(self._log.path)
                self._say(f"the learned rates of every {self.settings.every} steps are in {where}")
        elif even_if_nothing and self.watched and not self.has_spawned:
            self._say("the script made no step with what was wrapped, so nothing was tuned")
        elif even_if_nothing and not self.has_spawned:
            kind = "optimizer that Mechanic could wrap" if self.left else "PyTorch optimizer"
            self._say(f"the script built no {kind}, so nothing was tuned")

    def begin_in_forked_process(self) -> None:
        """What the parent has built and logged so far is the parent's to report."""
        self.watched = []
        self._log = self._rank = None

    # Hooks.

    def _before_step(self, watched: Watched, *_: Any) -> None:
        if self.settings.probe is not None and watched.steps >= self.settings.probe:
            raise ProbeIsDone  # another optimizer makes fewer steps

    def _after_step(self, watched: Watched, optimizer: Any, *_: Any) -> None:
        watched.steps += 1
        watched.note(optimizer)
        if watched not in self.watched:  # built before this process was forked
            self.watched.append(watched)
        if self._rank is None:
            self._rank = _rank()
        if self.settings.log is not None and self._rank == 0 and watched.steps % self.settings.every == 0:
            self._log = self._log or _Log(self.settings.log)
            self._log.write(self.watched.index(watched), watched, optimizer)
        if self.settings.probe is not None and watched.steps == (self.settings.probe + 1) // 2:
            watched.half_scales = watched.scales()
        if self.settings.probe is not None and all(each.steps >= self.settings.probe for each in self.watched):
            raise ProbeIsDone

    def _say_once(self, what: str, text: str) -> None:
        """A script may build an optimizer for every parameter, in one line."""
        if what not in self._said:
            self._said.add(what)
            self._say(text)

    def _say(self, text: str, *, blank: bool = False) -> None:
        """On stderr, so that what the script prints can still be piped; of several ranks, by the first."""
        if (_rank() if self._rank is None else self._rank) == 0:
            print(("\n" if blank else "") + f"mechanic: {text}", file=sys.stderr, flush=True)


class _Log:
    """A line for every tuner of a step, in a .jsonl or .csv file."""

    COLUMNS = ("optimizer", "class", "step", "tuner", "scale", "learned", "lr")

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: IO[str] = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115 - closed by the session
        self._csv = csv.writer(self._file) if path.endswith(".csv") else None
        if self._csv is not None:
            self._csv.writerow(self.COLUMNS)

    def write(self, index: int, watched: Watched, optimizer: Any) -> None:
        rates, learned = optimizer.learning_rates(), optimizer.learned_rates()
        for tuner, scale in optimizer.scales().items():
            row = (index, watched.cls.__name__, watched.steps, tuner, scale, learned[tuner], rates[tuner])
            if self._csv is not None:
                self._csv.writerow(row)
            else:
                self._file.write(json.dumps(dict(zip(self.COLUMNS, row, strict=True))) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def _place(frame: types.FrameType) -> str:
    """The file and line, as short as it stays clear."""
    file = frame.f_code.co_filename
    for folder in ("site-packages", "dist-packages"):
        _, found, inside = file.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return f"{inside}:{frame.f_lineno}"
    near = os.path.relpath(file) if os.path.isabs(file) and os.path.exists(file) else file
    return f"{file if near.startswith(os.pardir) else near}:{frame.f_lineno}"
