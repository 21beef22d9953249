"""The methods of the contest: what each adds to the shared knobs, its authors' defaults, and how it is built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.contest.points import Knob, Point, points
from benchmarks.suite.contenders import Contender
from benchmarks.suite.schedules import constant, cosine, warm_up
from benchmarks.suite.task import Task
from mechanic.torch import Mechanic

Build = Callable[[nn.Module, Task, Point], Optimizer]
DEFAULTS = 0  # the number of the authors' point; the searched ones follow


@dataclass(frozen=True)
class Method:
    """A method, and what its authors' point has besides betas of .9 and .999, and no decay or warm-up."""

    name: str
    label: str
    build: Build
    defaults: Point
    own: Knob | None = None  # the knob that only it has
    decays: bool = True  # along a cosine to 0 after the warm-up; else the rate stays
    warms_itself: bool = False

    def points(self) -> list[Point]:
        """By number: the authors', then those that are searched."""
        defaults = {"1-beta1": 0.1, "1-beta2": 0.001, "weight_decay": 0.0, "warm_up": 0.0, **self.defaults}
        return [defaults, *points(self.own)]

    def contender(self, number: int) -> Contender:
        point = self.points()[number]
        shape = constant if self.warms_itself else warm_up(point["warm_up"], cosine if self.decays else constant)

        def build(model: nn.Module, task: Task, lr: float) -> Optimizer:
            return self.build(model, task, point)

        lr = point.get("lr", 1.0)
        return Contender(contender_name(self.name, number), self.name, build, lr=lr, schedule=shape, point=point)


def contender_name(method: str, number: int) -> str:
    return f"{method} #{number}"


def _shared(point: Point) -> dict[str, Any]:
    return {"betas": (1 - point["1-beta1"], 1 - point["1-beta2"]), "weight_decay": point["weight_decay"]}


def _adamw(model: nn.Module, task: Task, point: Point) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=point.get("lr", 1.0), fused=True, **_shared(point))


def _nadamw(model: nn.Module, task: Task, point: Point) -> Optimizer:
    options = {"decoupled_weight_decay": True, "foreach": True, **_shared(point)}
    return torch.optim.NAdam(model.parameters(), lr=point["lr"], **options)


def _ours(model: nn.Module, task: Task, point: Point) -> Optimizer:
    return Mechanic(_adamw(model, task, point))


def _schedule_free(model: nn.Module, task: Task, point: Point) -> Optimizer:
    from schedulefree import AdamWScheduleFree

    steps = int(point["warm_up"] * task.steps)
    return AdamWScheduleFree(model.parameters(), lr=point["lr"], warmup_steps=steps, **_shared(point))


def _prodigy(model: nn.Module, task: Task, point: Point) -> Optimizer:
    from prodigyopt import Prodigy

    # Under a warm-up its authors advise the safeguard.
    options = {"d_coef": point["d_coef"], "safeguard_warmup": point["warm_up"] > 0, **_shared(point)}
    return Prodigy(model.parameters(), lr=1.0, **options)


def _prodigy_plus_schedule_free(model: nn.Module, task: Task, point: Point) -> Optimizer:
    from prodigyplus import ProdigyPlusScheduleFree

    return ProdigyPlusScheduleFree(model.parameters(), lr=1.0, d_coef=point["d_coef"], **_shared(point))


def _d_adaptation(model: nn.Module, task: Task, point: Point) -> Optimizer:
    from dadaptation import DAdaptAdam

    return DAdaptAdam(model.parameters(), lr=1.0, decouple=True, **_shared(point))


LR = Knob("lr", 1e-4, 3e-2)
LR_WITHOUT_DECAY = Knob("lr", 1e-4, 1e-1)  # Schedule-Free's authors advise larger rates
D_COEF = Knob("d_coef", 0.25, 4.0)  # "the preferred way to tune the method", by the authors of both

OURS = "mechanic"
METHODS = {
    method.name: method
    for method in (
        Method(OURS, "Mechanic(AdamW)", _ours, {"weight_decay": 0.01}),
        Method("nadamw", "NAdamW", _nadamw, {"lr": 2e-3}, LR),
        Method("adamw", "AdamW", _adamw, {"lr": 1e-3, "weight_decay": 0.01}, LR),
        Method(
            "schedule-free",
            "Schedule-Free AdamW",
            _schedule_free,
            {"lr": 2.5e-3, "warm_up": 0.05},  # they advise a warm-up; 5 % as in the other suites
            LR_WITHOUT_DECAY,
            decays=False,
            warms_itself=True,
        ),
        Method("prodigy", "Prodigy", _prodigy, {"d_coef": 1.0}, D_COEF),
        Method(
            "prodigy-plus-schedule-free",
            "Prodigy + Schedule-Free",
            _prodigy_plus_schedule_free,
            {"d_coef": 1.0, "1-beta2": 0.01},
            D_COEF,
            decays=False,
        ),
        Method("d-adaptation", "D-Adaptation", _d_adaptation, {}),
    )
}


@functools.cache
def contenders() -> dict[str, Contender]:
    """All points of all methods."""
    found = [method.contender(number) for method in METHODS.values() for number in range(len(method.points()))]
    return {contender.name: contender for contender in found}
