"""The figures that a sceptic asks for: intervals, what is trivial, what is possible, and each rival beside ours."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.contest import score
from benchmarks.contest.choice import behind
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import BASES, FAMILIES, Results, members
from benchmarks.suite.record import EVALUATED_AT, final
from benchmarks.suite.tasks import TASKS

KEY = "train_loss"
MIDDLE = EVALUATED_AT.index(0.5)
SLACKS = (0.02, 0.05)
EARLY = (0.02, 0.05, 0.1)  # shares of the steps
ByTask = dict[str, float]


def gains_as_0(results: Results, family: str, base: str | None = None) -> ByTask:
    """Rho by task, where gains count as 0; of one base, or the mean over those that the family has."""
    found: dict[str, list[float]] = {}
    for (task, of), rho in results.family(family).items():
        if base in (of, None):
            found.setdefault(task, []).append(max(rho, 0.0))
    return {task: statistics.mean(values) for task, values in found.items()}


def shown(values: Iterable[float]) -> str:
    """A mean with its interval over the tasks, in %; nothing of nothing."""
    found = score.interval(list(values))
    return "" if math.isnan(found.mean) else f"{percent(found.mean)} [{percent(found.low)}, {percent(found.high)}]"


def headline(results: Results) -> str:
    """Gains as 0 with intervals, beside the trivial, one rate for all, and the greedy, the best rate at half time."""
    rows = []
    for family, label in FAMILIES.items():
        cells = [shown(gains_as_0(results, family, base).values()) for base in (*BASES, None)]
        if any(cells):
            rows.append([label, *cells])
    for label, rule in RULES.items():
        by_base = {base: rule(results, base) for base in BASES}
        together: dict[str, list[float]] = {}
        for by_task in by_base.values():
            for task, rho in by_task.items():
                together.setdefault(task, []).append(rho)
        every = [statistics.mean(values) for values in together.values()]
        if every:
            rows.append([label, *(shown(by_task.values()) for by_task in by_base.values()), shown(every)])
    return table(["gains as 0, ρ in %", *BASES.values(), "all"], rows)


def _rho_of_rate(results: Results, task: str, base: str, lr: float) -> float:
    """On the first seed, on which alone the whole grid was run; gains as 0."""
    tuned = statistics.mean(results.tuned(task, base, KEY)[1])
    loss = final(results.runs(task, base)[lr][0], KEY)
    return max(0.0, min(1.0, (loss - tuned) / (results.initial(task, KEY) - tuned)))


def fixed_rate(results: Results, base: str) -> ByTask:
    """One learning rate for all tasks, the best in the mean over all the others, on each task in turn."""
    tasks = [task for task in results.tasks() if results.tuned(task, base, KEY)]
    if len(tasks) < 2:
        return {}
    rates = set.intersection(*(set(results.runs(task, base)) for task in tasks))
    rhos = {lr: {task: _rho_of_rate(results, task, base, lr) for task in tasks} for lr in sorted(rates)}
    found = {}
    for left in tasks:
        best = min(rhos, key=lambda lr, left=left: sum(rho for task, rho in rhos[lr].items() if task != left))
        found[left] = rhos[best][left]
    return found


def greedy(results: Results, base: str) -> ByTask:
    """The grid's learning rate with the lowest loss at half time: what a perfect but greedy tuner would take."""

    def at_half_time(record: dict[str, Any]) -> float:
        values = record["curve"].get(KEY, [])
        return values[MIDDLE] if len(values) > MIDDLE and values[MIDDLE] is not None else math.inf

    found = {}
    for task in results.tasks():
        if results.tuned(task, base, KEY):
            by_lr = results.runs(task, base)
            best = min(by_lr, key=lambda lr, by_lr=by_lr: at_half_time(by_lr[lr][0]))
            found[task] = _rho_of_rate(results, task, base, best)
    return found


def schedule_free_tuned(results: Results, base: str) -> ByTask:
    """Schedule-Free with the best learning rate of a grid; nothing before all tasks have one."""
    found = {}
    for task in results.tasks():
        pair = [results.tuned(task, who, KEY) for who in (base, f"tuned schedule-free / {base}")]
        if None in pair:
            return {}
        tuned, theirs = (statistics.mean(losses) for _, losses in pair)
        found[task] = max(0.0, min(1.0, (theirs - tuned) / (results.initial(task, KEY) - tuned)))
    return found


RULES: dict[str, Callable[[Results, str], ByTask]] = {
    "one learning rate, the best on all other tasks": fixed_rate,
    "the grid's rate that is best at half time": greedy,
    "Schedule-Free, tuned lr": schedule_free_tuned,
}


def paired(results: Results) -> str:
    """Each rival's rho minus ours on the same task and base, gains as 0: above 0, ours is better."""
    ours = results.family("mechanic")
    rows = []
    for family, label in FAMILIES.items():
        theirs = results.family(family)
        by_task: dict[str, list[float]] = {}
        for pair in theirs.keys() & ours.keys():
            by_task.setdefault(pair[0], []).append(max(theirs[pair], 0.0) - max(ours[pair], 0.0))
        if family == "mechanic" or not by_task:
            continue
        means = [statistics.mean(by_task[task]) for task in sorted(by_task)]
        better = sum(mean > 0.005 for mean in means), sum(mean < -0.005 for mean in means)
        rows.append([label, shown(means), f"{better[0]}", f"{better[1]}", len(means)])
    return table(["minus Mechanic's ρ, in points", "mean", "ours ahead", "theirs ahead", "tasks"], rows)


def losing(results: Results, above: float = 0.05) -> str:
    """The runs of ours that are farthest behind, with the train losses that their rho is made of."""
    found = {pair: rho for pair, rho in results.family("mechanic").items() if rho > above}
    rows = []
    for task, base in sorted(found, key=found.__getitem__, reverse=True):
        tuned = statistics.mean(results.tuned(task, base, KEY)[1])
        ours = statistics.mean(final(record, KEY) for record in results.records_of(task, f"mechanic {base}"))
        losses = (f"{loss:#.3g}" for loss in (results.initial(task, KEY), tuned, ours))
        rows.append([f"{task}, {BASES[base]}", percent(found[task, base]), TASKS[task].steps, *losses])
    return table(["", "ρ %", "steps", "initial train loss", "tuned", "Mechanic"], rows)


def time_to_target(results: Results, base: str = "adamw") -> str:
    """Steps to the tuned final train loss and a share of the descent more, in units of the tuned base's.

    The time is the median over the seeds. The tuned base, with its best learning rate, is one of the field.
    """
    names = {family: members(family)[base] for family in FAMILIES if base in members(family)}
    names = {family: name for family, name in names.items() if any(name == of for _, of in results.pairs())}
    tasks = [
        task
        for task in results.tasks()
        if results.tuned(task, base, KEY) and all(results.records_of(task, name) for name in names.values())
    ]
    heads = ("reached", "steps, median", "area of the profile")
    header = ["", *(f"+ {slack:.0%}: {head}" for slack in SLACKS for head in heads)]
    if not tasks or not names:
        return table(header, [])
    rows = {"tuned": [f"{BASES[base]}, tuned"], **{family: [FAMILIES[family]] for family in names}}
    for slack in SLACKS:
        times = [_times(results, task, base, names, slack) for task in tasks]
        areas = score.areas(times)
        for who, row in rows.items():
            reached = [of_task for of_task in times if math.isfinite(of_task[who])]
            both = [of_task[who] / of_task["tuned"] for of_task in reached if math.isfinite(of_task["tuned"])]
            found = score.interval(areas[who])
            row.append(f"{len(reached)} of {len(tasks)}")
            row.append(f"{statistics.median(both):.2f}" if both else "")
            row.append(f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]")
    return table(header, rows.values())


def _times(results: Results, task: str, base: str, names: dict[str, str], slack: float) -> dict[str, float]:
    lr, losses = results.tuned(task, base, KEY)
    target = score.target(statistics.mean(losses), slack, results.initial(task, KEY))
    records = {"tuned": results.runs(task, base)[lr]}
    records |= {family: results.records_of(task, name) for family, name in names.items()}
    return {
        who: score.over_seeds([score.time_to(target, r["evaluated"], r["curve"].get(KEY, [])) for r in of])
        for who, of in records.items()
    }


def early(results: Results, base: str = "adamw") -> str:
    """How far behind the tuned base a run is after a few per cent of its steps; gains as 0, mean over the tasks."""
    kinds = {
        "convex": [task for task in results.tasks() if task.startswith("convex")],
        "others": [task for task in results.tasks() if not task.startswith("convex")],
    }
    rows = []
    for family, label in FAMILIES.items():
        name = members(family).get(base)
        cells = []
        for tasks in kinds.values():
            for share in EARLY:
                found = [_behind_early(results, task, base, name, share) for task in tasks]
                cells.append(shown(value for value in found if value is not None))
        if any(cells):
            rows.append([label, *cells])
    steps = TASKS[kinds["convex"][0]].steps if kinds["convex"] else 0  # all have as many
    heads = [f"convex, {share * steps:.0f} steps" for share in EARLY]
    return table(["", *heads, *(f"others, {share:.0%} of the steps" for share in EARLY)], rows)


def _behind_early(results: Results, task: str, base: str, contender: str | None, share: float) -> float | None:
    best = results.tuned(task, base, KEY)
    records = results.records_of(task, contender) if contender else []
    if best is None or not records:
        return None
    index = EVALUATED_AT.index(share)

    def loss(of: list[dict[str, Any]]) -> float:
        curves = (record["curve"].get(KEY, []) for record in of)
        values = [curve[index] if len(curve) > index else None for curve in curves]
        return math.inf if None in values else statistics.mean(values)

    return behind(loss(records), loss(results.runs(task, base)[best[0]]), results.initial(task, KEY))


TABLES: dict[str, Callable[[Results], str]] = {
    "early": early,
    "headline": headline,
    "losing": losing,
    "paired": paired,
    "time-to-target": time_to_target,
    "time-to-target-sgd": functools.partial(time_to_target, base="sgd"),
}
