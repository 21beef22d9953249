"""Made-up records and contenders for the tests of the harness."""

import os

import pytest
import torch

from benchmarks.suite.contenders import BASES, CONTENDERS, MUON_MIDDLE, MUON_PLANE, Contender
from benchmarks.suite.record import EVALUATED_AT

needs_data = pytest.mark.skipif("MECHANIC_DATA" not in os.environ, reason="needs MECHANIC_DATA, a folder of datasets")


# A variant is Mechanic with another config, and the lines of a plane are one optimizer.
KINDS = [name for name in CONTENDERS if not name.startswith(("variant", "flat")) and name not in MUON_PLANE.lines]
KINDS += ["variant forgetting=0 / adamw", f"muon {MUON_MIDDLE:g}"]
"""The contenders that run different code."""


def some_lr(contender):
    return contender.lr or {**BASES, "muon": MUON_MIDDLE}[contender.base]


def record_of(run, loss):
    count = len(EVALUATED_AT)
    curve = {key: [1.0] * (count - 3) + [loss] * 3 for key in ("train_loss", "test_loss")}
    return {**vars(run), "seconds": 1.0, "curve": curve}


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
