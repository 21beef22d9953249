"""Made-up records and contenders for the tests of the benchmarks, and the rows of the tables that are made of them."""

import collections
import itertools
import os
from pathlib import Path

import pytest
import torch

from benchmarks.report import sceptic
from benchmarks.report.results import Results
from benchmarks.suite.contenders import BASES, CONTENDERS, MUON_MIDDLE, MUON_PLANE, Contender
from benchmarks.suite.record import EVALUATED_AT, Run, run_of

DOCS = Path(__file__).parents[2] / "docs"
needs_data = pytest.mark.skipif("MECHANIC_DATA" not in os.environ, reason="needs MECHANIC_DATA, a folder of datasets")

# A variant is Mechanic with another config, and the lines of a plane are one optimizer.
KINDS = [name for name in CONTENDERS if not name.startswith(("variant", "flat")) and name not in MUON_PLANE.lines]
KINDS += ["variant forgetting=0 / adamw", f"muon {MUON_MIDDLE:g}"]
"""The contenders that run different code."""
TASKS = ("convex-iris", "convex-wine", "convex-glass")


def some_lr(contender):
    return contender.lr or {**BASES, "muon": MUON_MIDDLE}[contender.base]


def made_up(run, **curve):
    """Evaluated at steps 0 to 1000."""
    return {**vars(run), "evaluated": [int(1000 * share) for share in EVALUATED_AT], "seconds": 1.0, "curve": curve}


def record_of(run, loss):
    values = falling(loss, len(EVALUATED_AT) - 3)
    return made_up(run, train_loss=values, test_loss=values)


def record(task, contender, lr, losses, seed=0):
    return made_up(Run(task, contender, lr, seed), train_loss=losses)


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


class FakePool:
    """Finishes what was started, in order, so many at once; some runs fail a number of times before."""

    def __init__(self, slots=1000, made=lambda run: record_of(run, 0.5), failures=None, at_once=10):
        self.slots, self.made, self.failures, self.at_once = slots, made, collections.Counter(failures), at_once
        self.in_flight, self.started, self.most = {}, collections.Counter(), 0

    def start(self, run):
        assert run not in self.in_flight
        self.in_flight[run] = None
        self.started[run] += 1
        self.most = max(self.most, len(self.in_flight))

    def finished(self):
        return [(run, self.outcome(run)) for run in list(itertools.islice(self.in_flight, self.at_once))]

    def outcome(self, run):
        del self.in_flight[run]
        if self.failures[run]:
            self.failures[run] -= 1
            return OSError("a disk\nis full")
        return self.made(run)


class Raising(torch.optim.SGD):
    """Raises in its third step."""

    error: type[Exception] = ZeroDivisionError
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 3:
            raise self.error("in the third step")
        super().step(closure)


def raising(error):
    """A contender that raises so, in the place of SGD."""
    optimizer = type("Raising", (Raising,), {"error": error})
    return Contender("sgd", "sgd", lambda model, task, lr: optimizer(model.parameters(), lr=lr))
