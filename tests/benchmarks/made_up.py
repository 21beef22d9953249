"""Made-up records, and the rows of the tables that are made of them."""

from benchmarks.report import sceptic
from benchmarks.report.results import Results
from benchmarks.suite.record import EVALUATED_AT, Run, run_of

TASKS = ("convex-iris", "convex-wine", "convex-glass")


def record(task, contender, lr, losses, seed=0):
    """Evaluated at steps 0 to 1000."""
    steps = [1000 * share for share in EVALUATED_AT]
    return {**vars(Run(task, contender, lr, seed)), "seconds": 1.0, "curve": {"step": steps, "train_loss": losses}}


def falling(loss, at, half=None):
    """From 1 to a loss, from an evaluation on; with another loss at half time alone."""
    values = [1.0] * at + [loss] * (len(EVALUATED_AT) - at)
    if half is not None:
        values[sceptic.MIDDLE] = half
    return values


def results_of(*records):
    return Results({run_of(each): each for each in records}, of=TASKS)


def grid(task, losses, halves=()):
    """AdamW's final loss by learning rate, 1, 2, ...; perhaps its losses at half time."""
    return [
        record(task, "adamw", float(lr), falling(loss, 10, *halves[lr - 1 : lr])) for lr, loss in enumerate(losses, 1)
    ]


def rows_of(text):
    lines = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines[2:]}
