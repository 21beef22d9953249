"""Makes docs/failures.md from the records."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from benchmarks.failures.contenders import CONTENDERS
from benchmarks.failures.runner import ROWS, Cell
from benchmarks.failures.verdicts import NOT_APPLICABLE, RAISES, REFUSED, RIGHT, WARNED, WRONG, Situation

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
LIMITS = {
    "one gradient × 1e6": "S halves for several steps, which takes the parameters back towards their start, and needs "
    "a thousand steps or more to grow again. A warning says so. `clip_grad_norm_` prevents it, as the next row shows.",
    "checkpoint with NaN": "The numbers of a checkpoint are loaded as torch loads them, unchecked.",
    **dict.fromkeys(
        ("checkpoint with a wrong shape", "checkpoint with an entry missing"),
        "Mechanic checks its own entries. The base's state is loaded as torch loads it, unchecked.",
    ),
}
SYMBOLS = {RIGHT: "✓", REFUSED: "refused", WARNED: "warned", RAISES: "raises", WRONG: "**wrong**", NOT_APPLICABLE: "–"}
INTRODUCTION = """\
# Failure matrix

Training does not always go as planned: a gradient is NaN, a process is killed, a checkpoint does not fit. This page
shows what Mechanic and its peers do in {rows} situations. Every cell was run; nothing is taken from documentation.

```sh
python -m benchmarks.failures run    # every cell; half an hour or less
python -m benchmarks.failures page   # this page, from the records
```

Each optimizer is built as its authors advise, with default options: `Mechanic(AdamW(lr=1.0))`, mechanic-pytorch's
`mechanize(AdamW)(lr=1.0)`, `Prodigy(lr=1.0)`, `DAdaptAdam(lr=1.0)`, `AdamWScheduleFree(lr=0.01)`,
`ProdigyPlusScheduleFree(lr=1.0)`, `AdamW(lr=0.01)`. AdamW and Schedule-Free do not learn their learning rate; 0.01
suits the task. Under FSDP2, Prodigy and D-Adaptation get `fsdp_in_use=True`, as their documentation asks; they then
call `.cuda()` on a buffer, which here stays on the CPU. `run --only "NaN gradient, once" --contender adamw` runs a
single cell.

The task is a small regression: a network of 212 parameters, noisy targets, 400 steps. An optimizer is always compared
with its own undisturbed run, never with another optimizer. It *keeps up* with that run if all parameters are finite
and the loss falls by at least two thirds of what it falls there.

| | |
|---|---|
| ✓ | right, by the criterion given below the table |
| refused | an error that is raised on purpose and names what is wrong |
| warned | the criterion is not met, and a warning, or a note on the error that the user gets, says what has happened |
| raises | any other error, or a crash |
| **wrong** | no error, and the criterion is not met |
| – | the situation cannot exist, for the reason given below the table |

An error is raised on purpose if a `raise` statement of the optimizer (or of `torch.optim`) made it, not an operation
that failed. It names what is wrong if its message has a word for it. The program checks both, in the same way for all
columns.
"""


def render(records: dict[Cell, dict[str, Any]]) -> str:
    themes: dict[str, list[Situation]] = {}
    for situation in ROWS.values():
        themes.setdefault(situation.theme, []).append(situation)
    parts = [INTRODUCTION.format(rows=len(ROWS)), _summary(records), _our_limits(records)]
    for theme, situations in themes.items():
        parts += [f"## {theme}\n", _table(situations, records), *(_details(each, records) for each in situations)]
    return "\n".join([*parts, _versions(records)])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _header(first: str) -> str:
    return _row([first, *(contender.title for contender in CONTENDERS.values())]) + _row(
        ["---"] * (1 + len(CONTENDERS))
    ).replace(" ", "")


def _summary(records: dict[Cell, dict[str, Any]]) -> str:
    labels = {**SYMBOLS, RIGHT: "✓ right", NOT_APPLICABLE: "– cannot exist"}
    lines = [
        _row([label, *(str(_count(records, key, verdict)) for key in CONTENDERS)]) for verdict, label in labels.items()
    ]
    return f"{_header('number of cells')}{''.join(lines)}"


def _our_limits(records: dict[Cell, dict[str, Any]]) -> str:
    """Which cells of ours are neither right nor refused, said before any table."""
    bad = [row for row in ROWS if records[row, "mechanic"]["verdict"] in (WRONG, RAISES, WARNED)]
    if not bad:
        return "Mechanic itself is right or refuses everywhere.\n"
    lines = [_filled(f"- *{row}*: {LIMITS.get(row, 'see below')}", "  ") for row in bad]
    return "".join(["Where Mechanic itself is neither right nor refuses:\n\n", *lines])


def _filled(text: str, indent: str = "") -> str:
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, 120, subsequent_indent=indent, **options) + "\n"


def _count(records: dict[Cell, dict[str, Any]], contender: str, verdict: str) -> int:
    return sum(records[row, contender]["verdict"] == verdict for row in ROWS)


def _table(situations: list[Situation], records: dict[Cell, dict[str, Any]]) -> str:
    rows = [
        _row([each.name, *(SYMBOLS[records[each.name, key]["verdict"]] for key in CONTENDERS)]) for each in situations
    ]
    return _header("situation") + "".join(rows)


def _details(situation: Situation, records: dict[Cell, dict[str, Any]]) -> str:
    """What happens, what is right, and what those did that are not; equal findings in one line."""
    found: dict[tuple[str, str], list[str]] = {}
    for key, contender in CONTENDERS.items():
        record = records[situation.name, key]
        if record["verdict"] != RIGHT:
            detail = record["detail"]
            said = f"`{detail.replace('`', chr(39))}`" if record["verdict"] in (REFUSED, RAISES) else detail
            tries = f" ({record['tries']})" if "tries" in record else ""
            found.setdefault((record["verdict"], said + tries), []).append(contender.title)
    head = _filled(f"**{situation.name}.** {situation.happens} *Right:* {situation.criterion}")
    lines = [_filled(f"- {', '.join(titles)}: {verdict}, {said}", "  ") for (verdict, said), titles in found.items()]
    return "".join([head, "\n" if lines else "", *lines])


def _versions(records: dict[Cell, dict[str, Any]]) -> str:
    versions = {item for record in records.values() for item in record["versions"].items()}
    listed = ", ".join(f"{package} {version}" for package, version in sorted(versions))
    return f"## Versions\n\n{_filled(listed + '.')}"
