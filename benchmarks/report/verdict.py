"""The tables of the verdict: what was searched, what was chosen, and how the choices did on held-out tasks."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.contest import score
from benchmarks.contest.choice import by_point, final_loss, lowest
from benchmarks.contest.methods import DEFAULTS, METHODS, OURS, contender_name
from benchmarks.contest.plan import SEEDS
from benchmarks.contest.points import POINTS, SHARED
from benchmarks.contest.tasks import HORIZONS, JUDGED, LEFT_OUT, SEARCHED, judged_name, search_name
from benchmarks.report.markdown import table
from benchmarks.suite.record import Run, evaluations, raised

SLACKS = (0.02, 0.05)
CLOCKS = {"steps": "steps", "cpu_seconds": "time"}
SEARCHES = {search_name(task) for task in SEARCHED}
LABELS = {"1of3": "⅓ of the steps", "2of3": "⅔", "3of3": "all"}
Records = Mapping[Run, dict[str, Any]]
Times = dict[str, dict[str, float]]  # by task and contender


class Judgement:
    """Questions to the contest's records."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.behind = by_point(records)
        self.points = lowest(self.behind)
        self._runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for run in sorted(records):
            self._runs.setdefault((run.task, run.contender), []).append(records[run])

    def calibrated(self) -> dict[str, str]:
        """The contenders at the points that were found, by method."""
        return {method: contender_name(method, number) for method, number in self.points.items()}

    def defaults(self) -> dict[str, str]:
        return {method: contender_name(method, DEFAULTS) for method in METHODS}

    def runs(self, task: str, horizon: str, contender: str) -> list[dict[str, Any]]:
        return self._runs.get((judged_name(task, horizon), contender), [])

    def tasks(self, horizon: str) -> list[str]:
        """Those on which every calibrated point was run."""
        names = self.calibrated().values()
        return [task for task in JUDGED if names and all(self.runs(task, horizon, name) for name in names)]

    def loss(self, task: str, horizon: str, contender: str) -> float:
        """The final test loss, median over the seeds."""
        return statistics.median(final_loss(record) for record in self.runs(task, horizon, contender))

    def target(self, task: str, horizon: str, slack: float, of_descent: bool) -> float:
        """From the best of all methods' points on this task, over as many steps."""
        best = min(self.loss(task, horizon, name) for name in self.calibrated().values())
        if not math.isfinite(best):
            return -math.inf  # nobody got to the end, and nobody reaches it
        return score.target(best, slack, self._initial(task, horizon) if of_descent else None)

    def _initial(self, task: str, horizon: str) -> float:
        records = [record for name in self.calibrated().values() for record in self.runs(task, horizon, name)]
        return statistics.median(r["curve"]["test_loss"][0] for r in records if r["curve"].get("test_loss"))

    @functools.cache  # noqa: B019 - lives as long as the report
    def times(self, horizon: str, slack: float, clock: str, of_descent: bool = False) -> Times:
        """When the targets were reached, by task and contender, defaults included where they were run."""
        names = [*self.calibrated().values(), *self.defaults().values()]
        found: Times = {}
        for task in self.tasks(horizon):
            target = self.target(task, horizon, slack, of_descent)
            found[task] = {
                name: score.over_seeds([_time_to(target, record, clock) for record in self.runs(task, horizon, name)])
                for name in dict.fromkeys(names)
            }
        return found

    def areas(
        self, field: Iterable[str], horizons: Iterable[str], slack: float, clock: str, of_descent: bool = False
    ) -> dict[str, list[float]]:
        """By contender of the field, one number per task: its part of the area, mean over the horizons."""
        names, by_horizon = list(field), []
        for horizon in horizons:
            times = self.times(horizon, slack, clock, of_descent)
            by_horizon.append(score.areas([{name: of_task[name] for name in names} for of_task in times.values()]))
        if not by_horizon or any(len(found) < len(set(names)) for found in by_horizon):
            return {}
        return {
            name: [statistics.mean(parts) for parts in zip(*(found[name] for found in by_horizon), strict=True)]
            for name in names
        }

    def ratios(self, horizons: Iterable[str], slack: float, clock: str) -> dict[str, list[float]]:
        """By method, at the point that was found: how many times as long as the fastest, per task and horizon."""
        names = self.calibrated()
        found = [
            score.ratios({method: of_task[name] for method, name in names.items()})
            for horizon in horizons
            for of_task in self.times(horizon, slack, clock).values()
        ]
        return {method: [of_task[method] for of_task in found] for method in names}

    def horizons(self) -> list[str]:
        """Those that all tasks of the contest were run over, so that every score is of the same tasks."""
        return [horizon for horizon in HORIZONS if len(self.tasks(horizon)) == len(JUDGED)]


def _time_to(target: float, record: dict[str, Any], clock: str) -> float:
    """In steps, or in the CPU's seconds, of which every step is given the same share."""
    if raised(record):
        return math.inf
    steps = score.time_to(target, record["evaluated"], record["curve"].get("test_loss", []))
    return steps if clock == "steps" else steps * record[clock] / max(record["evaluated"][evaluations(record) - 1], 1)


def shown(found: score.Interval, sign: bool = False) -> str:
    form = "+.2f" if sign else ".2f"
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def setup(judgement: Judgement) -> str:
    """What the contest consists of."""
    seeds = len({run.seed for run in judgement.records if run.task not in SEARCHES}) or SEEDS
    hours = sum(record.get("cpu_seconds", 0.0) for record in judgement.records.values()) / 3600
    rows: list[list[object]] = [
        ["methods", len(METHODS)],
        ["settings of every method", f"{POINTS}, and its authors' defaults"],
        ["tasks of the search", f"{len(SEARCHED)}: {', '.join(SEARCHED)}"],
        ["left out of it", "; ".join(f"{task} ({why})" for task, why in LEFT_OUT.items())],
        ["tasks of the judgement", f"{len(JUDGED)}: {', '.join(JUDGED)}"],
        ["seeds", f"1 in the search, {seeds} in the judgement"],
        ["horizons", ", ".join(LABELS.values())],
        ["targets", " and ".join(f"{slack:.0%}" for slack in SLACKS) + " above the best final test loss"],
        ["range of τ", f"1 … {score.FARTHEST:g}"],
        ["intervals", f"95 %, {score.RESAMPLES:,} bootstraps over the tasks"],
        ["runs", f"{len(judgement.records):,}"],
        ["CPU time of all runs", f"{hours:.1f} hours"],
    ]
    return table(["", ""], rows)


def knobs(judgement: Judgement) -> str:
    """The ranges of the search."""
    rows = [[knob.name, "all", str(knob)] for knob in SHARED]
    rows += [[method.own.name, method.label, str(method.own)] for method in METHODS.values() if method.own]
    return table(["hyperparameter", "of", "values"], rows)


def chosen_points(judgement: Judgement) -> str:
    """Every method's point, and how far it, the authors' and the median point are behind the best of all, in %."""
    rows = []
    for method, number in judgement.points.items():
        behind = judgement.behind[method]
        shares = (behind[number], behind[DEFAULTS], statistics.median(behind[DEFAULTS + 1 :]))
        cells = [f"{100 * share:.1f}" for share in shares]
        for name, label in ((number, f"#{number}"), (DEFAULTS, "defaults")):
            point = METHODS[method].points()[name]
            own = METHODS[method].own
            values = [f"{own.name} {point[own.name]:g}"] if own else [""]
            values += [f"{point[knob.name]:g}" for knob in SHARED]
            rows.append([METHODS[method].label, label, *values, *(cells if name == number else ["", "", ""])])
            if number == DEFAULTS:
                break
    heads = [knob.name for knob in SHARED]
    return table(
        ["", "setting", "own", *heads, "behind the best of all, %", "defaults", "median setting"],
        rows,
    )


def scores(judgement: Judgement, slack: float, of_descent: bool = False) -> str:
    """Areas of the profile at the points that were found, by steps and by time, per horizon and over all."""
    names, over = judgement.calibrated(), judgement.horizons()
    columns = {"all horizons": over, **{LABELS[horizon]: [horizon] for horizon in over}} if over else {}
    rows = {method: [METHODS[method].label] for method in names}
    for clock in CLOCKS:
        for horizons in columns.values():
            found = judgement.areas(names.values(), horizons, slack, clock, of_descent)
            for method, name in names.items():
                rows[method].append(shown(score.interval(found[name])))
    heads = [f"{kind}, {label}" for kind in CLOCKS.values() for label in columns]
    return table(["area of the profile", *heads], rows.values() if columns else [])


def differences(judgement: Judgement) -> str:
    """Each method's area minus ours, paired by task, over all horizons."""
    names, over = judgement.calibrated(), judgement.horizons()
    rows = {method: [METHODS[method].label] for method in names if method != OURS and over}
    for slack in SLACKS:
        for clock in CLOCKS:
            found = judgement.areas(names.values(), over, slack, clock)
            for method, row in rows.items():
                row.append(shown(score.difference(found[names[method]], found[names[OURS]]), sign=True))
    heads = [f"+ {slack:.0%}, {kind}" for slack in SLACKS for kind in CLOCKS.values()]
    return table(["minus Mechanic's", *heads], rows.values())


def defaults(judgement: Judgement) -> str:
    """Found points and authors' defaults in one field, over all horizons: first the found point's area, then theirs."""
    names, theirs, over = judgement.calibrated(), judgement.defaults(), judgement.horizons()
    rows = {method: [METHODS[method].label] for method in names if over}
    field = list(dict.fromkeys([*names.values(), *theirs.values()]))
    for slack in SLACKS:
        for clock in CLOCKS:
            found = judgement.areas(field, over, slack, clock)
            for method, row in rows.items():
                both = (score.interval(found[side[method]]) for side in (names, theirs))
                row.append(" → ".join(map(shown, both)))
    heads = [f"+ {slack:.0%}, {kind}" for slack in SLACKS for kind in CLOCKS.values()]
    return table(["found → defaults", *heads], rows.values())


def final_losses(judgement: Judgement, horizon: str = "3of3") -> str:
    """The final test loss, median over the seeds; after a dash, of how many runs the target of + 2 % was reached."""
    names = judgement.calibrated()
    rows = []
    for task in judgement.tasks(horizon):
        target, cells = judgement.target(task, horizon, SLACKS[0], of_descent=False), []
        for name in names.values():
            runs = judgement.runs(task, horizon, name)
            reached = sum(math.isfinite(_time_to(target, record, "steps")) for record in runs)
            loss = judgement.loss(task, horizon, name)
            cells.append(f"{loss:.4g} – {reached}/{len(runs)}" if math.isfinite(loss) else f"diverged – 0/{len(runs)}")
        rows.append([task, f"{target:.4g}", *cells])
    return table(["", f"target, + {SLACKS[0]:.0%}", *(METHODS[method].label for method in names)], rows)


def by_task(judgement: Judgement) -> str:
    """Every task's part of the score by steps, over all horizons, sorted by how far we are ahead of the best other."""
    names, over = judgement.calibrated(), judgement.horizons()
    found = judgement.areas(names.values(), over, SLACKS[0], "steps")
    parts = [{method: found[name][index] for method, name in names.items()} for index in range(len(JUDGED)) if found]

    def lead(of_task: tuple[str, dict[str, float]]) -> float:
        return of_task[1][OURS] - max(part for method, part in of_task[1].items() if method != OURS)

    by_lead = sorted(zip(JUDGED, parts, strict=False), key=lead, reverse=True)
    rows = [[task, *(f"{part:.2f}" for part in of_task.values())] for task, of_task in by_lead]
    return table(["", *(METHODS[method].label for method in names)], rows)


def sentence(judgement: Judgement) -> str:
    """What the scores support, and no more. A difference is clear where its interval leaves out 0."""
    names, over = judgement.calibrated(), judgement.horizons()
    if not over:
        return "Nothing yet: the contest has not been run to its end."
    parts = []
    for clock, kind in CLOCKS.items():
        found = judgement.areas(names.values(), over, SLACKS[0], clock)
        scores = {method: score.interval(found[name]) for method, name in names.items()}
        best = max(scores, key=lambda method: scores[method].mean)
        rank = 1 + sum(scores[method].mean > scores[OURS].mean for method in scores)
        differ = {method: score.difference(found[name], found[names[OURS]]) for method, name in names.items()}
        ahead = [method for method, by in differ.items() if by.low > 0]
        behind = [method for method, by in differ.items() if by.high < 0]
        parts += [
            f"By {kind}, {METHODS[best].label} has the best score, {shown(scores[best])}.",
            f"Mechanic is number {rank} of {len(names)}, with {shown(scores[OURS])}.",
            f"Clearly ahead of Mechanic: {_listed(ahead)}. Clearly behind it: {_listed(behind)}.",
        ]
    both = names[OURS], judgement.defaults()[OURS]
    field = dict.fromkeys([*names.values(), *judgement.defaults().values()])
    found = judgement.areas(field, over, SLACKS[0], "steps")
    point, own = (shown(score.interval(found[name])) for name in both)
    also = f"If every method also enters with its authors' defaults, Mechanic's found setting has {point} by steps,"
    return " ".join([*parts, also, f"and its defaults have {own}."])


def _listed(methods: list[str]) -> str:
    return ", ".join(METHODS[method].label for method in methods) or "no method"


TABLES: dict[str, Callable[[Judgement], str]] = {
    "verdict": sentence,
    "verdict-setup": setup,
    "verdict-knobs": knobs,
    "verdict-points": chosen_points,
    **{f"verdict-scores-{slack * 100:g}": functools.partial(scores, slack=slack) for slack in SLACKS},
    "verdict-differences": differences,
    "verdict-defaults": defaults,
    **{
        f"verdict-scores-{slack * 100:g}-of-descent": functools.partial(scores, slack=slack, of_descent=True)
        for slack in SLACKS
    },
    "verdict-by-task": by_task,
    "verdict-losses": final_losses,
}
