"""Which runs a suite still needs, from the records alone, so that a stopped suite continues where it was."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.suite.contenders import (
    BASES,
    BY_ROLE,
    CHANGES,
    CONTENDERS,
    FLAT,
    MUON,
    MUON_LINES,
    MUON_PLANE,
    OURS,
    PEERS,
    STORED,
    TUNED,
    Contender,
    muon_point,
)
from benchmarks.suite.record import Run, final, raised
from benchmarks.suite.split import DEVELOPMENT, HELD_OUT
from benchmarks.suite.task import Task
from benchmarks.suite.tasks import (
    BATCHES,
    CONVEX,
    CPU,
    DROPOUT,
    FEW,
    FINE_TUNING,
    GPT,
    GPT_WIDTHS,
    HARD,
    IMAGES,
    LANGUAGE,
    LONG,
    LONGER,
    MUON_WIDTHS,
    TABULAR,
    TASKS,
    WIDTHS,
)

Records = Mapping[Run, dict[str, Any]]
Pair = tuple[Task, Contender]


def find(run: Run) -> Pair:
    """What a run is of."""
    return TASKS[run.task], CONTENDERS[run.contender]


GRID = range(-4, 5)  # half decades around the middle
FARTHEST = 20  # half decades: where even a growing grid ends
MUON_FARTHEST = len(MUON_LINES) // 2
EVERYONE = [*TUNED, *OURS, *PEERS]
_ADAMW = [CONTENDERS["adamw"], CONTENDERS["mechanic adamw"]]


def _product(tasks: Iterable[Task], contenders: Iterable[Contender]) -> list[Pair]:
    return [(task, contender) for task in tasks for contender in contenders]


SUITES = {
    "smoke": _product([TASKS["convex-iris"]], EVERYONE),
    "convex": _product(CONVEX, EVERYONE),
    "flat": _product([TASKS["mlp-fashion"], TASKS["gpt-shakespeare"]], FLAT),
    "images": _product(IMAGES, EVERYONE),
    "language": _product([TABULAR, *LANGUAGE], EVERYONE),
    "fine-tuning": _product(FINE_TUNING, EVERYONE),
    "scale": _product([*BATCHES, *WIDTHS], _ADAMW),
    "hard": _product(HARD, EVERYONE),
}
SUITES["cpu"] = [pair for name, pairs in SUITES.items() if name != "smoke" for pair in pairs]
SUITES["development"] = _product([TASKS[name] for name in DEVELOPMENT], EVERYONE)
SUITES["held-out"] = _product([TASKS[name] for name in HELD_OUT], EVERYONE)
SUITES["horizons"] = _product(LONGER, _ADAMW)
# Where a run takes a few seconds.
SUITES["defaults"] = _product(
    [*CONVEX, TABULAR, *IMAGES[2:], GPT], [CONTENDERS[f"variant {c} / {b}"] for c in CHANGES for b in ("sgd", "adamw")]
)


def _named(*prefixes: str, bases: Iterable[str] = ("adamw",)) -> list[Contender]:
    return [c for name, c in CONTENDERS.items() if name.startswith(prefixes) and c.base in bases]


_BOTH = ("sgd", "adamw")
SUITES |= {
    "few": _product(FEW, _named("adamw", "mechanic adamw", "observing")),
    "dropout": _product([GPT, *DROPOUT], _named("adamw", "mechanic adamw", "mechanic-paper", "observing 1")),
    "schedule-free": _product(
        [TABULAR, *IMAGES[2:], *LANGUAGE], _named("tuned schedule-free", "mechanic schedule-free")
    ),
    "schedule-free-tuned": _product(CPU, _named("tuned schedule-free", bases=_BOTH)),
    "layers": _product([*IMAGES, *LANGUAGE], _named("per layer", bases=_BOTH)),
    "long": _product(LONG, _named("mechanic sgd", "mechanic adamw", "variant before", bases=_BOTH)),
    "towards-start": _product([*IMAGES[2:], GPT], _named("towards start")),
    "storages": _product(CPU, [*STORED, *_named("mechanic sgd", "mechanic adamw", bases=_BOTH)]),
    "muon": _product([*LANGUAGE, FINE_TUNING[0], FINE_TUNING[-1], IMAGES[3]], [*_ADAMW, *MUON, MUON_PLANE]),
    "muon-widths": [
        *_product(GPT_WIDTHS, _ADAMW),
        *_product(MUON_WIDTHS, [CONTENDERS["mechanic muon / one"], CONTENDERS[BY_ROLE], MUON_PLANE]),
    ],
}


def grid_point(base: str, index: int) -> float:
    return float(f"{BASES[base] * 10 ** (index / 2):.3g}")


def _line_of(plane: Contender, index: int) -> str:
    return plane.lines[len(plane.lines) // 2 + index]


def _needed_on_plane(task: Task, plane: Contender, records: Records, seeds: int) -> list[Run]:
    """From nine points around the middle of two learning rates, with what lies around the best, until that is tried."""

    def run(point: tuple[int, int], seed: int = 0) -> Run:
        return Run(task.name, _line_of(plane, point[1]), muon_point(point[0]), seed)

    def around(point: tuple[int, int], steps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        found = [(point[0] + i, point[1] + j) for i, j in steps]
        return [each for each in found if max(map(abs, each)) <= MUON_FARTHEST]

    square = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    if runs := [run(point) for point in square if run(point) not in records]:
        return runs
    side = range(-MUON_FARTHEST, MUON_FARTHEST + 1)
    tried = {point: records[run(point)] for point in itertools.product(side, side) if run(point) in records}
    losses = {point: final(record) for point, record in tried.items() if not raised(record)}
    best = min(losses, key=losses.__getitem__)
    if runs := [run(point) for point in around(best, square) if point not in tried]:
        return runs
    again = around(best, [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])
    return [each for point in again for seed in range(1, seeds) if (each := run(point, seed)) not in records]


def needed(task: Task, contender: Contender, records: Records, seeds: int) -> list[Run]:
    """The runs that can be started now; more may be needed when these are recorded."""

    def missing(lrs: Iterable[float], wanted: Iterable[int]) -> list[Run]:
        runs = [Run(task.name, contender.name, lr, seed) for seed in wanted for lr in lrs]
        return [run for run in runs if run not in records]

    if contender.lines:
        return _needed_on_plane(task, contender, records, seeds)
    if contender.lrs:
        return missing(contender.lrs, [0])
    if contender.lr is not None:
        return missing([contender.lr], range(seeds))

    points = {index: grid_point(contender.base, index) for index in range(-FARTHEST, FARTHEST + 1)}
    tried = {index for index, lr in points.items() if Run(task.name, contender.name, lr, 0) in records}
    if runs := missing([points[index] for index in GRID], [0]):
        return runs
    on_grid = range(min(tried), max(tried) + 1)
    if runs := missing([points[index] for index in on_grid], [0]):
        return runs
    again = set()
    for key in ("train_loss", "test_loss"):
        on_seed_0 = {i: records[Run(task.name, contender.name, points[i], 0)] for i in on_grid}
        losses = {i: final(record, key) for i, record in on_seed_0.items() if not raised(record)}
        if not losses:
            return []  # it raises everywhere: more of the same would not tell more
        best = min(losses, key=losses.__getitem__)
        grown = {best - 1, best + 1} - tried
        if grown and abs(best) < FARTHEST:
            return missing([points[index] for index in grown], [0])
        # Neighbours too where the tables look for the best: on one seed it may be the best by luck.
        again |= {best} if key == "test_loss" else {best - 1, best, best + 1} & tried
    return missing([points[index] for index in sorted(again)], range(1, seeds))


def expected_runs(contender: Contender, seeds: int) -> int:
    """About how many runs a pair takes from nothing."""
    if contender.lines:
        return 16 + 5 * (seeds - 1)
    if contender.lrs:
        return len(contender.lrs)
    return seeds if contender.lr is not None else len(GRID) + 1 + 4 * (seeds - 1)
