"""The tables of the page "What we tried": how the defaults were chosen, and what goes beyond the paper."""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable

from benchmarks.report.markdown import percent, table
from benchmarks.report.results import BASES, Results
from benchmarks.suite.contenders import STORAGES
from benchmarks.suite.record import final
from benchmarks.suite.task import Task
from benchmarks.suite.tasks import DROPOUT, FEW, FINE_TUNING, GPT, IMAGES, LANGUAGE, LONG, TABULAR

# What is forgotten was chosen on these, and settling on more; each is settled on the others.
CHOSEN_ON = {f"convex-{name}" for name in ("glass", "dna", "usps")}
CHOSEN_ON |= {"mlp-fashion", "mlp-adult", "cnn-mnist", "lstm-tatoeba"}
SETTLING_CHOSEN_ON = CHOSEN_ON | {"resnet-cifar10", "resnet-cifar100"}
SETTLING_CHOSEN_ON |= {f"convex-{name}" for name in ("vehicle", "iris", "wine", "sensorless", "cifar100_histograms")}


BEFORE_KEEPING_STILL = "variant before keeping still /"
"""The defaults as far as settling. Commit 33f5c99 made these records; the code of today cannot make them again."""

BEFORE_GROWING = "variant before growing /"
"""The defaults before the stake could grow, up to commit e5cbdc7. Whatever is compared with them was made with them."""

AT_THE_LOOK = "variant at the look /"
"""The defaults when the held-out tasks were looked at, commit fa41979. What is recorded on them since has been seen."""


def choice(
    results: Results, without: str, ours: str, chosen_on: Iterable[str] = (), bases: Iterable[str] = ("sgd", "adamw")
) -> str:
    """A default before and after, on the tasks that had no part in the choice."""
    rows, means = [], defaultdict(list)
    for task in results.tasks():
        cells = []
        for base in bases:
            pair = [results.rho(task, f"{name} {base}", base) for name in (without, ours)]
            if task in chosen_on or not all(pair):
                continue
            before, after = map(statistics.mean, pair)
            cells.append(f"{percent(before)} → {percent(after)}")
            means[base].append((before, after))
        if cells:
            rows.append([task, *cells])
    for name, least in (("mean", -math.inf), ("mean, gains as 0", 0.0)):
        cells = []
        for pairs in means.values():
            before, after = (statistics.mean(max(rho, least) for rho in side) for side in zip(*pairs, strict=True))
            cells.append(f"{percent(before)} → {percent(after)}")
        rows.append([name, *cells])
    return table(["", *(BASES[base] for base in means)], rows)


growing = functools.partial(choice, without=BEFORE_GROWING, ours="mechanic", bases=BASES)
since_the_look = functools.partial(choice, without=AT_THE_LOOK, ours="mechanic", bases=BASES)


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
        names = ("adamw", f"{BEFORE_GROWING} adamw", "observing 1 / adamw", "observing 4 / adamw")
        tuned, ours, *observing = (_mean_final(results, task, name, "test_loss") for name in names)
        closed = (f"{found:.3f} ({100 * (ours - found) / (ours - tuned):.0f} %)" for found in observing)
        learned = statistics.mean(
            final(record, "train_accuracy") for record in results.records_of(task, f"{BEFORE_GROWING} adamw")
        )
        rows.append([task, percent(learned), f"{tuned:.3f}", f"{ours:.3f}", *closed])
    return table(
        ["", "train accuracy %", "tuned on the test loss", "Mechanic", "observing every step", "every fourth"], rows
    )


def dropout(results: Results) -> str:
    """Rho with AdamW, task by task."""
    rows = []
    order = [GPT, *DROPOUT[:3], *FINE_TUNING[:2], *DROPOUT[3:], *FINE_TUNING[2:4]]
    for task in _having(results, f"{BEFORE_GROWING} adamw", order):
        names = ("mechanic-paper adamw", f"{BEFORE_GROWING} adamw", "observing 1 / adamw")
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
            names = f"{BEFORE_KEEPING_STILL} {base}", f"per layer / {base}"
            pair = (results.rho(task, name, base) for name in names)
            cells.append(" → ".join(percent(statistics.mean(values)) if values else "" for values in pair))
        rows.append([task, *cells])
    return table(["one scale → one per layer", "SGD with momentum", "AdamW"], rows)


def long(results: Results) -> str:
    names = {"variant before forgetting /": "before forgetting", "variant before settling /": "before settling"}
    names |= {BEFORE_KEEPING_STILL: "before keeping still", BEFORE_GROWING: "keeping still"}
    rows = [
        [
            f"{task}, {BASES[base]}",
            *(f"{_mean_final(results, task, f'{name} {base}', 'train_loss'):.4f}" for name in names),
        ]
        for task in _having(results, f"{BEFORE_GROWING} adamw", LONG)
        for base in ("sgd", "adamw")
    ]
    return table(["train loss after 2000 steps", *names.values()], rows)


def towards_start(results: Results) -> str:
    rows = []
    for task in _having(results, "towards start 1.0 / adamw", [*IMAGES[2:], GPT]):
        names = ("adamw", "towards start 0.1 / adamw", "towards start 1.0 / adamw", "mechanic adamw")
        rows.append([task, *(f"{_mean_final(results, task, name, 'train_loss'):.4f}" for name in names)])
    return table(["train loss", "AdamW, tuned", "pulled by 0.1, tuned", "pulled by 1, tuned", "Mechanic"], rows)


def storages(results: Results) -> str:
    """Rho with Delta in float32, and how much more or less it is with Delta in fewer bytes, in points.

    The differences are means over all seeds that the three have, with the standard error if they are above one point.
    """
    bases = ("adamw", "sgd")
    rows, more = [], defaultdict(list)
    for task in results.tasks():
        cells = [task]
        for base in bases:
            names = [f"{BEFORE_GROWING} {base}", *(f"delta {name} / {base}" for name in STORAGES)]
            found = [results.rho_of_every_seed(task, name, base) for name in names]
            if seeds := set.intersection(*map(set, found)):
                whole, *stored = found
                cells.append(percent(statistics.mean(results.rho(task, names[0], base))))
                for name, rhos in zip(names[1:], stored, strict=True):
                    differences = [rhos[seed] - whole[seed] for seed in seeds]
                    mean = statistics.mean(differences)
                    more[name].append(mean)
                    error = statistics.stdev(differences) / len(seeds) ** 0.5 if len(seeds) > 1 else 0.0
                    cells.append(_points(mean) + (f" ± {100 * error:.1f}" if mean > 0.01 and error else ""))
        if len(cells) == 1 + len(bases) * (1 + len(STORAGES)):
            rows.append(cells)
    for label, summarise in (("mean", statistics.mean), ("worst", max)):
        cells = [label]
        for base in bases:
            found = (more[f"delta {name} / {base}"] for name in STORAGES)
            cells += ["", *(_points(summarise(values)) if values else "" for values in found)]
        rows.append(cells)
    heads = [f"{BASES[base]}, {name}" for base in bases for name in ("float32", *STORAGES)]
    return table(["", *heads], rows)


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"


TABLES: dict[str, Callable[[Results], str]] = {
    "forgetting": functools.partial(
        choice, without="variant before forgetting /", ours="variant before settling /", chosen_on=CHOSEN_ON
    ),
    "settling": functools.partial(
        choice, without="variant before settling /", ours=BEFORE_KEEPING_STILL, chosen_on=SETTLING_CHOSEN_ON
    ),
    "keeping-still": functools.partial(choice, without=BEFORE_KEEPING_STILL, ours=BEFORE_GROWING, bases=BASES),
    "growing": growing,
    "held-out": held_out,
    "dropout": dropout,
    "schedule-free": schedule_free,
    "layers": layers,
    "long": long,
    "towards-start": towards_start,
    "storages": storages,
}
