"""The tasks of the contest: development tasks, where points are searched, and held-out tasks, where they are judged.

The methods bring schedules of their own, in place of the tasks'.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.suite import tasks as suite
from benchmarks.suite.split import DEVELOPMENT, HELD_OUT
from benchmarks.suite.task import Task

LEFT_OUT = {  # of the development tasks, and why no point is searched there
    "pinn-heat": "time",
    "diffusion-mnist": "time",
    "contrastive-mnist": "time",
    "policy-cartpole": "time",
    "lora-banking77": "time",
    "set-mnist": "time",
    "gru-mnist": "time",
    "noisy-labels-mnist": "time",
    "mlp-adult-loss1e-6": "gradients near Adam's eps: it would tell about eps, which is no knob here",
    "mlp-fashion-constant": "the network and images of imbalanced-fashion",
}
SEARCHED = tuple(name for name in DEVELOPMENT if name not in LEFT_OUT)
JUDGED = HELD_OUT
HORIZONS = {"1of3": 1 / 3, "2of3": 2 / 3, "3of3": 1.0}  # shares of the steps, each with runs of its own

# The mean of the last three is the final loss. A search asks for that alone, the judges also when a target was reached.
OF_A_SEARCH = (0.0, 0.3, 0.6, 0.9, 0.95, 1.0)
OF_A_JUDGE = tuple(index / 20 for index in range(21))
RECORDED: dict[str, tuple[str, ...]] = {"curves": ("test_loss",), "ends": ()}
SLOWER = 1.5  # than the tasks' guess of a run: the mean over the methods, of which some take longer than AdamW


def search_name(task: str) -> str:
    return f"{task}-search"


def judged_name(task: str, horizon: str) -> str:
    return f"{task}-{horizon}"


def _search(of: Task) -> Task:
    return replace(of, name=search_name(of.name), evaluated_at=OF_A_SEARCH, seconds=SLOWER * of.seconds, **RECORDED)


def _judged(of: Task, horizon: str) -> Task:
    share = HORIZONS[horizon]
    seconds = SLOWER * share * of.seconds + 1.0  # for the evaluations
    name = judged_name(of.name, horizon)
    steps = round(share * of.steps)
    return replace(of, name=name, steps=steps, evaluated_at=OF_A_JUDGE, seconds=seconds, **RECORDED)


SEARCHES = [_search(suite.TASKS[name]) for name in SEARCHED]
JUDGES = [_judged(suite.TASKS[name], horizon) for name in JUDGED for horizon in HORIZONS]
TASKS = {task.name: task for task in [*SEARCHES, *JUDGES]}
