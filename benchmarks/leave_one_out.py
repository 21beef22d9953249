"""What each rule of the tuner is worth: ours with one of them changed, on the suite and the development tasks.

    python -m benchmarks.leave_one_out run FOLDER [--seeds 1] [--bases sgd adamw] [NAME ...]
    python -m benchmarks.leave_one_out table FOLDER

A change is an edit of the source. For each a copy of the package is made, and ``python -m benchmarks run`` uses it. Its
records go to ``FOLDER/NAME``. What is there is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.report.markdown import percent
from benchmarks.report.markdown import table as markdown_table
from benchmarks.report.results import Results
from benchmarks.suite.record import ROOT
from benchmarks.suite.recordbook import RECORDS, RecordBook
from benchmarks.suite.split import DEVELOPMENT
from benchmarks.suite.tasks import CPU

SUITES = {"cpu": [task.name for task in CPU], "development": list(DEVELOPMENT)}
BASES = ("sgd", "adamw", "nadamw", "lion")
Edit = tuple[str, str]  # a name and its new value, or a piece of the source and what is in its place

NO_JUMP = ("stake / jump,", "stake,")
NEAR = [
    ("poor & (grad_share > SMALL_GRADIENT)", "grad_share > SMALL_GRADIENT"),
    ("stake = xp.where(pays, grown,", "stake = xp.where(pays & (scale * delta_norm < initial_norm), grown,"),
]
NO_GUARD = ("guard", "False")
# In a step S changes by at most a share PACE eta / sqrt(sum of all eta^2), which is as fast as it grows where all
# feedback agrees, and it rises only if the feedback speaks for Delta. This is in place of the guard, of settling with
# the schedule and with the steps, and of what keeps the stake from jumping.
ONE_PACE = [
    ("TINY = 1e-37", "TINY = 1e-37\nPACE = 1.0"),
    ("    nonfinite_steps: Array  #", "    travelled: Array\n    nonfinite_steps: Array  #"),
    ("stake, state.nonfinite_steps", "stake, travelled, state.nonfinite_steps"),
    (
        "    if config.settle:\n        # A change",
        """\
    now = xp.ones_like(steps) if rate is None else xp.clip(rate, 0.0, None) + xp.zeros_like(steps)
    travelled = xp.hypot(state.travelled, now)
    most = 1 + PACE * now / xp.clip(travelled, TINY, None)
    total = xp.sum(scales, -1, keepdims=True)
    young = xp.where(state.largest_delta > 0, state.largest_delta / some_delta, 1.0)
    wanted = xp.clip(total, scale * young / most, scale * xp.where(feedback > 0, 1.0, most))
    scales = xp.where((scale > 0) & (total > 0), scales * (wanted / xp.clip(total, TINY, None)), scales)
    if False:
        # A change""",
    ),
    NO_GUARD,
    NO_JUMP,
]
NO_KEEPING_STILL = ("    if rate is not None and config.settle:\n", "    if False:\n")


def explores(far: str) -> list[Edit]:
    """The stake grows whatever was won and at any gradient, while S |Delta| is less than so many times |x_1|."""
    near = f"pays & (scale * delta_norm < {far} * initial_norm)"
    return [
        ("poor & (grad_share > SMALL_GRADIENT)", "grad_share > -1"),
        ("xp.where(pays, grown,", f"xp.where({near}, grown,"),
    ]


CHANGES: dict[str, list[Edit]] = {
    "as it is": [],
    "no pull": [("decay", "0.0")],
    "pull 10 times": [("decay", "0.01")],
    "no late pull": [("late_decay", "0.0")],
    "no guard": [NO_GUARD],
    "no forgetting": [("forgetting", "0.0")],
    "forgetting 2": [("forgetting", "2.0")],
    "forgetting 8": [("forgetting", "8.0")],
    "no pace": [("pace = 1.0 if rate is None else _pace(rate, largest_rate, xp)", "pace = 1.0")],
    "no keeping still": [NO_KEEPING_STILL],
    "no calm": [("CALM_AFTER", "1e12")],
    "calm after 300": [("CALM_AFTER", "300")],
    "no settling at all": [("settle", "False")],
    "absolute start of 1e-6": [("relative_start", "False"), ("s_init", "1e-6")],
    "start .003": [("s_init", "0.003")],
    "start .03": [("s_init", "0.03")],
    "start .1": [("s_init", "0.1")],
    "stake does not grow": [("LARGEST_STAKE", "1.0")],
    "stake grows whatever was won": [("ENOUGH_WON", "1e30")],
    "stake grows at any gradient": [("SMALL_GRADIENT", "0.0")],
    "stake grows above .1": [("SMALL_GRADIENT", "0.1")],
    "stake ignores jumps": [NO_JUMP],
    "betas from .9": [("betas", "(0.9, 0.99, 0.999, 0.9999, 0.99999)")],
    "betas without .99999 and more": [("betas", "(0.99, 0.999, 0.9999)")],
    "near": NEAR,
    **{
        f"one pace{name}": [*explores(far), *ONE_PACE, *more]
        for name, far, more in (
            ("", "1", []),
            (" of a half", "1", [("PACE", "0.5")]),
            (" of 2", "1", [("PACE", "2.0")]),
            (", explores 3 times as far", "3", []),
            (", explores without bound", "1e30", []),
            (", rises at any feedback", "1e30", [("xp.where(feedback > 0, 1.0, most)", "most")]),
            (", no late pull", "1", [("late_decay", "0.0")]),
            (", no pull", "1", [("late_decay", "0.0"), ("decay", "0.0")]),
            (", no keeping still", "1", [NO_KEEPING_STILL]),
            (", no forgetting", "1", [("forgetting", "0.0")]),
        )
    },
}


def copied(folder: Path, edits: list[Edit]) -> Path:
    """A folder with a copy of the package, changed."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "mechanic", folder / "mechanic", ignore=shutil.ignore_patterns("__pycache__"))
    paths = [folder / "mechanic" / name for name in ("tuner.py", "config.py")]
    for old, new in edits:
        pattern = rf"^( *{old}(?:: .+)? = ).+$" if old.isidentifier() else rf"(){re.escape(old)}"
        made = [re.subn(pattern, lambda found, new=new: found[1] + new, path.read_text(), flags=re.M) for path in paths]
        if sum(count for _, count in made) != 1:
            raise SystemExit(f"{old!r} is not there once: the source has changed")
        for path, (text, _) in zip(paths, made, strict=True):
            path.write_text(text)
    return folder


def run(folder: Path, names: list[str], bases: list[str], seeds: int) -> None:
    for name in names:
        source = copied(folder / "sources" / name.replace(" ", "-"), CHANGES[name])
        environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"}
        for suite in SUITES:
            command = [sys.executable, "-m", "benchmarks", "--records", str(folder / name), "run", suite]
            command += ["--seeds", str(seeds), "--only", *(f"mechanic {base}" for base in bases)]
            subprocess.run(command, check=True, env=environment, cwd=ROOT)


def table(folder: Path) -> str:
    """Of every change the mean rho in %, gains as 0, by suite and base; how many are within 2 %; and the worst."""
    tuned = {run: record for run, record in RecordBook(RECORDS).records.items() if run.contender in BASES}
    rows = []
    for name in CHANGES:
        results = Results({**tuned, **RecordBook(folder / name).records}, itertools.chain(*SUITES.values()))
        found = {
            (task, base): max(0.0, statistics.mean(rho))
            for task in results.tasks()
            for base in BASES
            if (rho := results.rho(task, f"mechanic {base}", base))
        }
        cells = []
        for tasks, base in itertools.product(SUITES.values(), BASES):
            these = [rho for (task, of), rho in found.items() if of == base and task in tasks]
            cells.append(f"{100 * statistics.mean(these):.2f}" if these else "")
        if found:
            worst = max(found, key=lambda pair: found[pair])
            within = f"{sum(rho <= 0.02 for rho in found.values())} of {len(found)}"
            rows.append([name, *cells, within, f"{percent(found[worst])} {', '.join(worst)}"])
    heads = [f"{suite}, {base}" for suite, base in itertools.product(SUITES, BASES)]
    return markdown_table(["", *heads, "within 2 %", "worst"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leave_one_out")
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of changes; all of them by default")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=["sgd", "adamw"])
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.folder.resolve(), arguments.names or list(CHANGES), arguments.bases, arguments.seeds)
    else:
        print(table(arguments.folder))
