"""Tables and figures from the records alone."""

from __future__ import annotations

import functools
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.contenders import CHANGES
from benchmarks.plan import final
from benchmarks.recordbook import RecordBook
from benchmarks.tasks import CPU, DROPOUT, FEW, FINE_TUNING, GPT, HARD, IMAGES, LANGUAGE, LONG, TABULAR, Task
from benchmarks.training import Run

BASES = {"sgd": "SGD with momentum", "adamw": "AdamW", "nadamw": "NAdamW", "lion": "Lion"}
FAMILIES = {  # by the first word of a contender's name
    "mechanic": "Mechanic",
    "mechanic-paper": "Mechanic, paper preset",
    "mechanic-pytorch": "mechanic-pytorch",
    "d-adaptation": "D-Adaptation",
    "prodigy": "Prodigy",
    "dog": "DoG, averaged",
    "schedule-free": "Schedule-Free, default lr",
    "prodigy-plus-schedule-free": "Prodigy + Schedule-Free",
}
ALONE = {"prodigy": "adamw", "dog": "sgd", "prodigy-plus-schedule-free": "adamw"}  # measured against one base


class Results:
    """Questions to the records."""

    def __init__(self, records: dict[Run, dict[str, Any]], seeds: int = 3) -> None:
        self.records, self.seeds = records, seeds
        self._runs: dict[tuple[str, str], dict[float, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for run in sorted(records):
            self._runs[run.task, run.contender][run.lr].append(records[run])

    def tasks(self) -> list[str]:
        """Those of the suite that have records; others are studies of their own."""
        found = {task for task, _ in self._runs}
        return [task.name for task in CPU if task.name in found]

    def records_of(self, task: str, contender: str) -> list[dict[str, Any]]:
        return [record for records in self.runs(task, contender).values() for record in records]

    def runs(self, task: str, contender: str) -> dict[float, list[dict[str, Any]]]:
        """By learning rate, one record per seed."""
        return self._runs.get((task, contender), {})

    @functools.cache  # noqa: B019 - lives as long as the report
    def tuned(self, task: str, base: str, key: str) -> tuple[float, list[float]] | None:
        """The best learning rate of those run on every seed, and its final losses by seed."""
        by_lr = {
            lr: [final(record, key) for record in records]
            for lr, records in self.runs(task, base).items()
            if len(records) >= self.seeds
        }
        return min(by_lr.items(), key=lambda item: statistics.mean(item[1])) if by_lr else None

    def rho(self, task: str, contender: str, base: str, key: str = "train_loss") -> list[float]:
        """By seed: 0 is the tuned base, 1 has learned nothing; also where a run broke off."""
        best = self.tuned(task, base, key)
        if best is None:
            return []
        tuned, start = statistics.mean(best[1]), self.initial(task, key)
        finals = [final(record, key) for record in self.records_of(task, contender)]
        return [min(1.0, (loss - tuned) / (start - tuned)) for loss in finals]

    @functools.cache  # noqa: B019
    def initial(self, task: str, key: str) -> float:
        values = [r["curve"][key][0] for run, r in self.records.items() if run.task == task and r["curve"].get(key)]
        return statistics.mean(values)

    def family(self, name: str, key: str = "train_loss") -> dict[tuple[str, str], float]:
        """Mean rho of a family's contenders, by task and base."""
        found = {}
        for base, contender in members(name).items():
            for task in self.tasks():
                if values := self.rho(task, contender, base, key):
                    found[task, base] = statistics.mean(values)
        return found


def members(family: str) -> dict[str, str]:
    """Its contenders, by the base they are measured against."""
    if family in ALONE:
        return {ALONE[family]: family}
    # D-Adaptation's Lion is an experiment, as its authors say, and diverges nearly everywhere here.
    return {base: f"{family} {base}" for base in BASES if (family, base) != ("d-adaptation", "lion")}


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    header = list(header)
    lines = [header, ["---"] + ["--:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


# Tables, by the name under which a page asks for them.


def summary(results: Results, key: str = "train_loss") -> str:
    ours = results.family("mechanic", key)
    rows = []
    for name, label in FAMILIES.items():
        found = results.family(name, key)
        if not found:
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
            ]
        )
    return table(
        ["", "cases", "mean ρ %", "gains as 0", "ours on the same", "median", "worst", "ρ ≤ 2 %", "ρ ≥ 50 %"],
        rows,
    )


def by_base(results: Results, cell: Callable[[str, str], str]) -> str:
    """A row per task, a column per base; what has not been run stays empty."""
    rows = []
    for task in results.tasks():
        has_run = [base for base in BASES if results.rho(task, f"mechanic {base}", base)]
        rows.append([task, *(cell(task, base) if base in has_run else "" for base in BASES)])
    return table(["", *BASES.values()], rows)


def per_task(results: Results) -> str:
    """Mean of rho over the seeds, half its spread, and the paper's preset."""

    def cell(task: str, base: str) -> str:
        ours, paper = (results.rho(task, f"{name} {base}", base) for name in ("mechanic", "mechanic-paper"))
        spread = (max(ours) - min(ours)) / 2
        before = f" ({percent(statistics.mean(paper))})" if paper else ""
        return f"{percent(statistics.mean(ours))} ± {percent(spread)}{before}"

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
    """Runs to an answer, and the time of a run as a ratio to the bare base's, median over tasks."""
    rows = []
    for base, label in BASES.items():
        grids = [len(results.runs(task, base)) for task in results.tasks() if results.runs(task, base)]
        if grids:
            mean = statistics.mean(grids)
            rows.append([f"{label}, tuned", f"{mean:.1f}", "1.00", f"{mean:.1f}"])
    for name, label in FAMILIES.items():
        ratios = []
        for base, contender in members(name).items():
            for task in results.tasks():
                bare, own = (_seconds(results.runs(task, who)) for who in (base, contender))
                if bare and own:
                    ratios.append(own / bare)
        if ratios:
            ratio = statistics.median(ratios)
            rows.append([label, 1, f"{ratio:.2f}", f"{ratio:.1f}"])
    return table(["", "runs", "time of a run", "runs × time"], rows)


def _seconds(by_lr: dict[float, list[dict[str, Any]]]) -> float | None:
    values = [record["seconds"] for records in by_lr.values() for record in records if record["seconds"]]
    return statistics.median(values) if values else None


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
    """Ours with one default changed, on the first seed; the mean and the worst rho over the tasks of that suite."""
    rows = []
    tasks = [task for task in results.tasks() if results.runs(task, "variant decay=0 / adamw")]
    for change in ("as it is", *CHANGES):
        cells: list[str] = []
        for base in ("sgd", "adamw"):
            name = f"mechanic {base}" if change == "as it is" else f"variant {change} / {base}"
            found = {task: results.rho(task, name, base) for task in tasks}
            first = {task: values[0] for task, values in found.items() if values}
            if not first:
                continue
            worst = max(first, key=first.__getitem__)
            cells += [percent(statistics.mean(first.values())), f"{percent(first[worst])} ({worst})"]
        if cells:
            rows.append([change, *cells])
    return table(["", "SGD: mean ρ %", "worst", "AdamW: mean ρ %", "worst"], rows)


# What is forgotten was chosen on these, and settling on more; each is settled on the others.
CHOSEN_ON = {f"convex-{name}" for name in ("glass", "dna", "usps")}
CHOSEN_ON |= {"mlp-fashion", "mlp-adult", "cnn-mnist", "lstm-tatoeba"}
SETTLING_CHOSEN_ON = CHOSEN_ON | {"resnet-cifar10", "resnet-cifar100"}
SETTLING_CHOSEN_ON |= {f"convex-{name}" for name in ("vehicle", "iris", "wine", "sensorless", "cifar100_histograms")}


def choice(results: Results, without: str, ours: str, chosen_on: set[str]) -> str:
    """A default before and after, on the tasks that had no part in the choice."""
    rows, means = [], defaultdict(list)
    for task in results.tasks():
        cells = []
        for base in ("sgd", "adamw"):
            pair = [results.rho(task, f"{name} {base}", base) for name in (without, ours)]
            if task in chosen_on or not all(pair):
                continue
            before, after = map(statistics.mean, pair)
            cells.append(f"{percent(before)} → {percent(after)}")
            means[base].append((before, after))
        if cells:
            rows.append([task, *cells])
    mean = [" → ".join(percent(statistics.mean(side)) for side in zip(*pairs, strict=True)) for pairs in means.values()]
    return table(["", "SGD with momentum", "AdamW"], [*rows, ["mean", *mean]])


# Studies beyond the paper.


def _mean_final(results: Results, task: str, contender: str, key: str) -> float:
    """Over the seeds; of the best learning rate, where there are several."""
    best = results.tuned(task, contender, key)
    return statistics.mean(best[1]) if best else float("nan")


def _having(results: Results, contender: str, tasks: Iterable[Task]) -> list[str]:
    return [task.name for task in tasks if results.runs(task.name, contender)]


def held_out(results: Results) -> str:
    """Test losses, and how much of the gap to a learning rate tuned on them is closed."""
    rows = []
    for task in _having(results, "observing 4 / adamw", FEW):
        names = ("adamw", "mechanic adamw", "observing 1 / adamw", "observing 4 / adamw")
        tuned, ours, *observing = (_mean_final(results, task, name, "test_loss") for name in names)
        closed = (f"{found:.3f} ({100 * (ours - found) / (ours - tuned):.0f} %)" for found in observing)
        learned = statistics.mean(
            final(record, "train_accuracy") for record in results.records_of(task, "mechanic adamw")
        )
        rows.append([task, percent(learned), f"{tuned:.3f}", f"{ours:.3f}", *closed])
    return table(
        ["", "train accuracy %", "tuned on the test loss", "Mechanic", "observing every step", "every fourth"], rows
    )


def dropout(results: Results) -> str:
    """Rho with AdamW, task by task."""
    rows = []
    order = [GPT, *DROPOUT[:3], *FINE_TUNING[:2], *DROPOUT[3:], *FINE_TUNING[2:4]]
    for task in _having(results, "mechanic adamw", order):
        names = ("mechanic-paper adamw", "mechanic adamw", "observing 1 / adamw")
        found = (results.rho(task, name, "adamw") for name in names)
        rows.append([task, *(percent(statistics.mean(values)) if values else "" for values in found)])
    return table(["", "paper preset", "Mechanic", "observing"], rows)


def schedule_free(results: Results) -> str:
    """On test data, against Schedule-Free tuned on it and, as ours is, on train data."""
    rows = []
    tuned, ours = "tuned schedule-free / adamw", "mechanic schedule-free / adamw"
    for task in _having(results, ours, [TABULAR, *IMAGES[2:], *LANGUAGE]):
        on_test, on_train = (results.tuned(task, tuned, key)[0] for key in ("test_loss", "train_loss"))
        losses = [
            statistics.mean(final(record, "test_loss") for record in records)
            for records in (results.runs(task, tuned)[on_test], results.runs(task, tuned)[on_train])
        ]
        reached = _mean_final(results, task, ours, "test_loss")
        cells = (f"{loss:.4f} ({100 * (reached / loss - 1):+.1f} %)" for loss in losses)
        rows.append([task, f"{reached:.4f}", *cells])
    return table(["test loss", "Mechanic(Schedule-Free)", "tuned on the test loss", "tuned on the train loss"], rows)


def layers(results: Results) -> str:
    rows = []
    for task in _having(results, "per layer / adamw", [*IMAGES, *LANGUAGE]):
        cells = []
        for base in ("sgd", "adamw"):
            pair = (results.rho(task, name, base) for name in (f"mechanic {base}", f"per layer / {base}"))
            cells.append(" → ".join(percent(statistics.mean(values)) if values else "" for values in pair))
        rows.append([task, *cells])
    return table(["one scale → one per layer", "SGD with momentum", "AdamW"], rows)


def long(results: Results) -> str:
    names = {"variant before forgetting /": "before forgetting", "variant before settling /": "before settling"}
    names |= {"mechanic": "now"}
    rows = [
        [
            f"{task}, {BASES[base]}",
            *(f"{_mean_final(results, task, f'{name} {base}', 'train_loss'):.4f}" for name in names),
        ]
        for task in _having(results, "mechanic adamw", LONG)
        for base in ("sgd", "adamw")
    ]
    return table(["train loss after 2000 steps", *names.values()], rows)


def towards_start(results: Results) -> str:
    rows = []
    for task in _having(results, "towards start 1.0 / adamw", [*IMAGES[2:], GPT]):
        names = ("adamw", "towards start 0.1 / adamw", "towards start 1.0 / adamw", "mechanic adamw")
        rows.append([task, *(f"{_mean_final(results, task, name, 'train_loss'):.4f}" for name in names)])
    return table(["train loss", "AdamW, tuned", "pulled by 0.1, tuned", "pulled by 1, tuned", "Mechanic"], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "summary": summary,
    "summary-test": functools.partial(summary, key="test_loss"),
    "per-task": per_task,
    "peers": peers,
    "learned-rates": learned_rates,
    "test-metric": on_test_data,
    "cost": cost,
    "flatness": flatness,
    "hard": hard,
    "defaults": defaults,
    "forgetting": functools.partial(
        choice, without="variant before forgetting /", ours="variant before settling /", chosen_on=CHOSEN_ON
    ),
    "settling": functools.partial(
        choice, without="variant before settling /", ours="mechanic", chosen_on=SETTLING_CHOSEN_ON
    ),
    "held-out": held_out,
    "dropout": dropout,
    "schedule-free": schedule_free,
    "layers": layers,
    "long": long,
    "towards-start": towards_start,
}


def fill(page: str, results: Results) -> str:
    """Put every table between the marks that name it."""
    for name, make in TABLES.items():
        marks = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page = re.sub(marks, lambda found, make=make: f"{found[1]}{make(results)}\n{found[2]}", page, flags=re.DOTALL)
    return page


PAGES = ("results.md", "tried.md")


def write(folder: Path, out: Path, seeds: int = 3) -> None:
    """Fill the tables of the pages on results, and draw their figures."""
    from benchmarks import figures

    results = Results(RecordBook(folder).records, seeds)
    out.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        path = out / page
        text = path.read_text(encoding="utf-8") if path.exists() else marks_of_all_tables()
        path.write_text(fill(text, results), encoding="utf-8")
    figures.draw_all(results, out / "figures")


def marks_of_all_tables() -> str:
    return "\n\n".join(f"<!-- table: {name} -->\n<!-- end -->" for name in TABLES)
