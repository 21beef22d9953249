"""What a cell can say, and how an exception is judged. The rules are the same for every contender."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.failures.contenders import Contender

RIGHT, REFUSED, WARNED, RAISES, WRONG, NOT_APPLICABLE = "right", "refused", "warned", "raises", "wrong", "n/a"
OPTIMIZER_PACKAGES = {"mechanic", "mechanic_pytorch", "prodigyopt", "dadaptation", "schedulefree", "prodigyplus"}
WORST_FIRST = [WRONG, RAISES, WARNED, REFUSED, RIGHT]


@dataclass(frozen=True)
class Outcome:
    verdict: str
    detail: str
    tries: str = ""  # of several, those that came out like this


class NotApplicable(Exception):  # noqa: N818
    """The situation cannot exist for a contender; the message says why."""


class ErrorInAnotherProcess(Exception):  # noqa: N818
    """An error of a rank or of a started process, with what is needed to judge it here."""

    def __init__(self, text: str, is_deliberate: bool) -> None:
        super().__init__(text)
        self.is_deliberate = is_deliberate


@dataclass(frozen=True)
class Situation:
    """A row. ``run`` returns an outcome or raises; ``refusal`` matches messages that name what is wrong."""

    name: str
    theme: str
    happens: str
    criterion: str
    run: Callable[[Contender], Outcome]
    refusal: str
    seconds: float  # after which a cell counts as hanging


SITUATIONS: dict[str, Situation] = {}


def theme(title: str) -> Callable[..., Callable[[Callable[[Contender], Outcome]], Callable[[Contender], Outcome]]]:
    """Make a decorator that enters situations under a theme."""

    def situation(name: str, happens: str, right: str, refusal: str = "$^", seconds: float = 120.0):
        def enter(run: Callable[[Contender], Outcome]) -> Callable[[Contender], Outcome]:
            if name in SITUATIONS:
                raise ValueError(f"two situations are called {name!r}")
            SITUATIONS[name] = Situation(name, title, happens, right, run, refusal, seconds)
            return run

        return enter

    return situation


def right_if(condition: bool, detail: str) -> Outcome:
    return Outcome(RIGHT if condition else WRONG, detail)


def worst(outcomes: dict[str, Outcome]) -> Outcome:
    """The worst of several tries of one situation, with the names of those that came out like this."""
    verdict = min((outcome.verdict for outcome in outcomes.values()), key=WORST_FIRST.index)
    names = [name for name, outcome in outcomes.items() if outcome.verdict == verdict]
    return Outcome(verdict, outcomes[names[0]].detail, ", ".join(names))


def judge(situation: Situation, contender: Contender) -> Outcome:
    """Run a cell, whatever comes of it."""
    try:
        return situation.run(contender)
    except NotApplicable as reason:
        return Outcome(NOT_APPLICABLE, str(reason))
    except Exception as error:
        return outcome_of(error, situation.refusal)


def outcome_of(error: Exception, refusal: str) -> Outcome:
    verdict = REFUSED if is_refusal(error, refusal) else RAISES
    return Outcome(verdict, text_of(error))


def is_refusal(error: Exception, refusal: str) -> bool:
    """Whether the error was raised on purpose and its message names what is wrong."""
    return is_deliberate(error) and re.search(refusal, str(error), re.IGNORECASE) is not None


def is_deliberate(error: BaseException) -> bool:
    """Whether a ``raise`` statement of an optimizer made the error, not an operation that failed."""
    if isinstance(error, ErrorInAnotherProcess):
        return error.is_deliberate
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    code = traceback.tb_frame.f_code
    module = str(traceback.tb_frame.f_globals.get("__name__"))
    is_of_an_optimizer = module.startswith("torch.optim") or module.partition(".")[0] in OPTIMIZER_PACKAGES
    return is_of_an_optimizer and linecache.getline(code.co_filename, traceback.tb_lineno).lstrip().startswith("raise")


def text_of(error: BaseException) -> str:
    """One line: the error's type and the beginning of its message."""
    if isinstance(error, ErrorInAnotherProcess):
        return str(error)
    lines = str(error).strip().splitlines()
    if any("Traceback" in line for line in lines):
        lines = lines[-1:]  # of the error it tells about
    message = " ".join(" ".join(lines).split())
    message = re.sub(r"tensor\(.*", "tensor(...)", message)
    short = message if len(message) <= 240 else f"{message[:237]}..."
    return f"{type(error).__name__}: {short}" if short else type(error).__name__
