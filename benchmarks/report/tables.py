"""The tables of the page on results."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

from benchmarks.report.markdown import percent, table
from benchmarks.report.results import BASES, FAMILIES, Results
from benchmarks.suite.contenders import CHANGES
from benchmarks.suite.record import final
from benchmarks.suite.tasks import HARD


def summary(results: Results, key: str = "train_loss") -> str:
    ours = results.family("mechanic", key)
    rows = []
    for name, label in FAMILIES.items():
        found = results.family(name, key)
        raised = ", ".join(f"{count} ({contender})" for contender, count in results.raised(name).items()) or "0"
        if not found:
            if results.raised(name):
                rows.append([label, 0, *[""] * 7, raised])
            continue
        shared = [pair for pair in found if pair in ours]
        values = list(found.values())
        worst = max(found, key=found.__getitem__)
        rows.append(
            [
                label,
                len(values),
                percent(statistics.mean(values)),
                percent(statistics.mean(max(value, 0.0) for value in values)),
                percent(statistics.mean(ours[pair] for pair in shared)) if shared else "",
                percent(statistics.median(values)),
                f"{percent(found[worst])} ({worst[0]}, {BASES[worst[1]]})",
                f"{sum(value <= 0.02 for value in values)}",
                f"{sum(value >= 0.5 for value in values)}",
                raised,
            ]
        )
    return table(
        ["", "runs", "mean ρ %", "gains as 0", "ours on the same", "median", "worst", "ρ ≤ 2 %", "ρ ≥ 50 %", "raised"],
        rows,
    )


def bases(results: Results) -> str:
    """Mechanic by base optimizer, each against the same optimizer with its best learning rate."""
    ours = results.family("mechanic")
    rows = []
    for base, label in BASES.items():
        found = {task: value for (task, of), value in ours.items() if of == base}
        if not found:
            continue
        worst = max(found, key=found.__getitem__)
        rows.append(
            [
                label,
                f"{sum(value <= 0.02 for value in found.values())} of {len(found)}",
                percent(statistics.median(found.values())),
                percent(statistics.mean(max(value, 0.0) for value in found.values())),
                f"{percent(found[worst])} ({worst})",
            ]
        )
    return table(["", "within 2 %", "median ρ %", "mean ρ %, gains as 0", "worst"], rows)


def by_base(results: Results, cell: Callable[[str, str], str]) -> str:
    """A row per task, a column per base; what has not been run stays empty."""
    rows = []
    for task in results.tasks():
        has_run = [base for base in BASES if results.rho(task, f"mechanic {base}", base)]
        if not has_run:
            continue
        rows.append([task, *(cell(task, base) if base in has_run else "" for base in BASES)])
    return table(["", *BASES.values()], rows)


def per_task(results: Results) -> str:
    """Mean of rho over the seeds, half its spread where there are several, and the paper's preset."""

    def cell(task: str, base: str) -> str:
        ours, paper = (results.rho(task, f"{name} {base}", base) for name in ("mechanic", "mechanic-paper"))
        spread = f" ± {percent((max(ours) - min(ours)) / 2)}" if len(ours) > 1 else ""
        before = f" ({percent(statistics.mean(paper))})" if paper else ""
        return f"{percent(statistics.mean(ours))}{spread}{before}"

    return by_base(results, cell)


def peers(results: Results) -> str:
    """Every family over the tasks, mean over the bases it has."""
    families = {name: results.family(name) for name in FAMILIES}
    rows = []
    for task in results.tasks():
        cells = []
        for found in families.values():
            values = [value for (of, _), value in found.items() if of == task]
            cells.append(percent(statistics.mean(values)) if values else "")
        rows.append([task, *cells])
    return table(["", *FAMILIES.values()], rows)


def learned_rates(results: Results) -> str:
    """The best learning rate of the grid, and what was learned by the middle of training."""

    def cell(task: str, base: str) -> str:
        best, _ = results.tuned(task, base, "train_loss")
        scales = [record["curve"]["scale"] for record in results.records_of(task, f"mechanic {base}")]
        return f"{best:.2g} / {statistics.median(scale[len(scale) // 2] for scale in scales):.2g}"

    return by_base(results, cell)


def on_test_data(results: Results) -> str:
    """Loss and accuracy: the base tuned on the test loss, and ours."""

    def cell(task: str, base: str) -> str:
        lr, _ = results.tuned(task, base, "test_loss")
        both = results.runs(task, base)[lr], results.records_of(task, f"mechanic {base}")
        losses, rights = (
            [statistics.mean(final(record, key) for record in records) for records in both]
            for key in ("test_loss", "test_accuracy")
        )
        return f"{losses[0]:.3g} → {losses[1]:.3g}, {percent(rights[0])} → {percent(rights[1])}"

    return by_base(results, cell)


def cost(results: Results) -> str:
    """Runs to an answer, on one seed."""
    rows = []
    for base, label in BASES.items():
        grids = [len(results.runs(task, base)) for task in results.tasks() if results.runs(task, base)]
        if grids:
            rows.append([f"{label}, tuned", f"{statistics.mean(grids):.1f}"])
    rows += [[label, 1] for name, label in FAMILIES.items() if results.family(name)]
    return table(["", "runs"], rows)


def flatness(results: Results) -> str:
    rows = []
    for task, contender in sorted(results._runs):
        if contender.startswith("flat "):
            by_lr = {lr: final(records[0]) for lr, records in results.runs(task, contender).items()}
            low, high = min(by_lr.values()), max(by_lr.values())
            rows.append(
                [
                    f"{task}, {BASES[contender.removeprefix('flat ')]}",
                    f"{min(by_lr):.0e} … {max(by_lr):.0e}",
                    f"{low:.4f} … {high:.4f}",
                    f"{100 * (high - low) / low:.3f} %",
                ]
            )
    return table(["", "lr passed", "final train loss", "spread"], rows)


def hard(results: Results) -> str:
    """The one problem on which nothing learns."""
    rows = []
    for (task, contender), by_lr in sorted(results._runs.items()):
        if task == HARD[0].name:
            best = min(by_lr.items(), key=lambda item: statistics.mean(final(r) for r in item[1]))
            rows.append([contender, f"{best[0]:.3g}", f"{statistics.mean(final(r) for r in best[1]):.4f}"])
    return table(["", "best lr", "final train loss"], rows)


def defaults(results: Results) -> str:
    """Ours with one default changed, on the first seed; the mean and the worst rho over the tasks of that suite.

    The variants are of the defaults before keeping still.
    """
    rows = []
    tasks = [task for task in results.tasks() if results.runs(task, "variant decay=0 / adamw")]
    for change in ("before keeping still", *CHANGES):
        cells: list[str] = []
        for base in ("sgd", "adamw"):
            found = {task: results.rho(task, f"variant {change} / {base}", base) for task in tasks}
            first = {task: values[0] for task, values in found.items() if values}
            if not first:
                continue
            worst = max(first, key=first.__getitem__)
            cells += [percent(statistics.mean(first.values())), f"{percent(first[worst])} ({worst})"]
        if cells:
            rows.append(["reference" if change == "before keeping still" else change, *cells])
    return table(["", "SGD: mean ρ %", "worst", "AdamW: mean ρ %", "worst"], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "summary": summary,
    "bases": bases,
    "summary-test": functools.partial(summary, key="test_loss"),
    "per-task": per_task,
    "peers": peers,
    "learned-rates": learned_rates,
    "test-metric": on_test_data,
    "cost": cost,
    "flatness": flatness,
    "hard": hard,
    "defaults": defaults,
}
