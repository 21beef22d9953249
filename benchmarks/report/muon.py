"""The tables of the page on Muon: two learning rates tuned on a plane, and one run of ours without any."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Results
from benchmarks.suite.contenders import BY_ROLE, MUON_LINES, MUON_TUNERS
from benchmarks.suite.plan import SUITES
from benchmarks.suite.record import final
from benchmarks.suite.tasks import MUON_WIDTHS

Pair = tuple[float, float]  # the learning rates of Muon and of AdamW


def plane(results: Results, task: str) -> dict[Pair, list[dict[str, Any]]]:
    """The records of the bare pair, one per seed."""
    return {
        (muon_lr, float(line.name.removeprefix("muon "))): records
        for line in MUON_LINES
        for muon_lr, records in results.runs(task, line.name).items()
    }


def best_pair(results: Results, task: str) -> tuple[Pair, float] | None:
    """The best of those that were run on most seeds, and the mean of its final train losses."""
    found = plane(results, task)
    seeds = max(map(len, found.values()), default=0)
    losses = {pair: _mean(records) for pair, records in found.items() if len(records) == seeds}
    return min(losses.items(), key=lambda item: item[1]) if losses else None


def _mean(records: Iterable[dict[str, Any]]) -> float:
    return statistics.mean(final(record) for record in records)


def _rho(results: Results, task: str, loss: float, best: float) -> float:
    start = results.initial(task, "train_loss")
    return min(1.0, (loss - best) / (start - best))


def against_the_plane(results: Results) -> str:
    """Final train losses, and in brackets how far ours is behind the best pair of learning rates, in %."""
    rows, behind = [], {kind: [] for kind in MUON_TUNERS}
    for task in dict.fromkeys(task.name for task, _ in SUITES["muon"]):
        best = best_pair(results, task)
        if best is None:
            continue
        (muon_lr, adamw_lr), loss = best
        adamw = results.tuned(task, "adamw", "train_loss")
        default = results.records_of(task, "muon, torch's defaults")
        cells = [f"{statistics.mean(adamw[1]):.4g}" if adamw else "", f"{_mean(default):.4g}" if default else ""]
        cells.append(f"{loss:.4g} at {muon_lr:.2g}, {adamw_lr:.2g} ({len(plane(results, task))} runs)")
        for kind in MUON_TUNERS:
            ours = results.records_of(task, f"mechanic muon / {kind}")
            if not ours:
                cells.append("")
                continue
            behind[kind].append(_rho(results, task, _mean(ours), loss))
            cells.append(f"{_mean(ours):.4g} ({percent(behind[kind][-1])})")
        rows.append([task, *cells])
    for label, summarise in _SUMMARIES.items():
        rows.append([label, "", "", "", *(percent(summarise(values)) if values else "" for values in behind.values())])
    return table(["", "AdamW, tuned", "Muon, torch's defaults", "Muon and AdamW, tuned", *_HEADS], rows)


def on_test_data(results: Results) -> str:
    """Test loss and accuracy in %; what is tuned is tuned for the train loss."""
    rows = []
    for task in dict.fromkeys(task.name for task, _ in SUITES["muon"]):
        best = best_pair(results, task)
        adamw = results.tuned(task, "adamw", "train_loss")
        ours = [results.records_of(task, f"mechanic muon / {kind}") for kind in MUON_TUNERS]
        if best is not None and adamw is not None and all(ours):
            found = [results.runs(task, "adamw")[adamw[0]], plane(results, task)[best[0]], *ours]
            rows.append([task, *map(_tested, found)])
    return table(["", "AdamW, tuned", "Muon and AdamW, tuned", *_HEADS], rows)


def _tested(records: list[dict[str, Any]]) -> str:
    loss, accuracy = (
        statistics.mean(final(record, key) for record in records) for key in ("test_loss", "test_accuracy")
    )
    return f"{loss:.4g}" if math.isinf(accuracy) else f"{loss:.4g}, {100 * accuracy:.1f}"


_HEADS = ["one tuner", "matrices and rest", "a tuner per role", "per layer"]
_SUMMARIES: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.mean,
    "mean, gains as 0": lambda values: statistics.mean(max(value, 0.0) for value in values),
    "worst": max,
}


def widths(results: Results) -> str:
    """Rho of one tuner and of one per role, and the scale of every role in the middle of training."""
    rows = []
    for task in MUON_WIDTHS:
        best = best_pair(results, task.name)
        by_role = results.records_of(task.name, BY_ROLE)
        one = results.records_of(task.name, "mechanic muon / one")
        if best is None or not by_role or not one:
            continue
        rhos = (percent(_rho(results, task.name, _mean(records), best[1])) for records in (one, by_role))
        scales = (middle_scale(by_role, role) for role in ROLES_OF_WIDTHS)
        cells = ("" if math.isnan(scale) else f"{scale:.2g}" for scale in scales)
        rows.append([task.name, "{:.2g}, {:.2g}".format(*best[0]), *rhos, *cells])
    heads = [f"S of {role}" for role in ROLES_OF_WIDTHS]
    return table(["", "best pair", "one tuner: ρ %", "per role: ρ %", *heads], rows)


def beside_adamw(results: Results) -> str:
    """Final train losses by width of AdamW and of Muon, each tuned and learned, with rho in % in brackets."""
    rows = []
    for task in MUON_WIDTHS:
        best = best_pair(results, task.name)
        adamw = results.tuned(task.name, "adamw", "train_loss")
        ours = [results.records_of(task.name, f"mechanic {name}") for name in ("adamw", "muon / one")]
        if best is None or adamw is None or not all(ours):
            continue
        tuned = statistics.mean(adamw[1]), best[1]
        found = [_mean(records) for records in ours]
        cells = [
            f"{loss:.4g} ({percent(_rho(results, task.name, loss, of))})" for loss, of in zip(found, tuned, strict=True)
        ]
        rows.append([task.name, f"{tuned[0]:.4g}", cells[0], f"{tuned[1]:.4g}", cells[1]])
    return table(["", "AdamW, tuned", "Mechanic with AdamW", "Muon and AdamW, tuned", "MechanicMuon"], rows)


ROLES_OF_WIDTHS = ("matrix", "embedding", "head", "vector")


def middle_scale(records: Iterable[dict[str, Any]], role: str) -> float:
    found = [record["curve"].get(f"scale of {role}") for record in records]
    return statistics.median(scales[len(scales) // 2] for scales in found if scales) if all(found) else math.nan


FAMILIES_OF_WIDTHS = ("gpt-shakespeare-width{}-layers2", "gpt-shakespeare-width{}-layers4", "bert-mlm-width{}")


def scales_by_width(results: Results, family: str) -> dict[str, dict[int, float]]:
    """S in the middle of training, by role and width, of the roles that the model has; empty below three widths."""
    found = {width: results.records_of(family.format(width), BY_ROLE) for width in (32, 64, 128, 256)}
    records = {width: of_width for width, of_width in found.items() if of_width}
    if len(records) < 3:
        return {}
    by_role = {role: {width: middle_scale(of, role) for width, of in records.items()} for role in ROLES_OF_WIDTHS}
    return {role: by_width for role, by_width in by_role.items() if not any(map(math.isnan, by_width.values()))}


def exponents(results: Results) -> str:
    """The slope of log S over log width, by role, least squares with its standard error; muP's for AdamW beside it."""
    rows = []
    for family in FAMILIES_OF_WIDTHS:
        if by_role := scales_by_width(results, family):
            slopes = (_slope(by_role[role]) if role in by_role else "" for role in ROLES_OF_WIDTHS)
            rows.append([family.format("…"), *slopes])
    rows.append(["muP, Adam", "-1", "0", "-1", "0"])
    return table(["exponent of the width in S", *ROLES_OF_WIDTHS], rows)


def _slope(by_width: dict[int, float]) -> str:
    xs, ys = ([math.log(number) for number in numbers] for numbers in (by_width.keys(), by_width.values()))
    slope, offset = statistics.linear_regression(xs, ys)
    rest = sum((y - slope * x - offset) ** 2 for x, y in zip(xs, ys, strict=True))
    spread = sum((x - statistics.mean(xs)) ** 2 for x in xs)
    return f"{slope:+.2f} ± {math.sqrt(rest / (len(xs) - 2) / spread):.2f}"


TABLES: dict[str, Callable[[Results], str]] = {
    "muon": against_the_plane,
    "muon-tests": on_test_data,
    "muon-widths": widths,
    "muon-beside-adamw": beside_adamw,
    "muon-exponents": exponents,
}
