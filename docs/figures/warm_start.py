"""What it is worth to start from the S that an earlier run has learned.

A run with another seed gives S. Then the task is trained anew, at all of its steps and at a quarter of them, without
and with that S: as the first scale, also ten times too large and too small, and as a floor at a third of it. Printed is
the final train loss over that of the cold start, in the mean of the seeds. Names of tasks may be given.
"""

import dataclasses
import functools
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from delta_storage import final_loss

from benchmarks.suite.contenders import base_class
from benchmarks.suite.loop import Training
from benchmarks.suite.tasks import TASKS
from mechanic.torch import Mechanic

RUNS = ["mlp-fashion", "cnn-mnist", "gpt-shakespeare"]
SEEDS = (0, 1)
EARLIER = 2


def first_scale(scale):
    return {"s_init": scale, "relative_start": False}


def build(model, make, config):
    return Mechanic(make(model.parameters()), config=config)


def learned(task, make):
    """S at the end of an earlier run."""
    for _, _, optimizer in Training(task, functools.partial(build, make=make, config=None), EARLIER):
        last = optimizer
    return last.scales()["default"]


def main(names):
    for name in names:
        for base in ("adamw", "sgd"):
            whole = TASKS[name]
            make = functools.partial(base_class(base, whole), lr=1.0)
            scale = learned(whole, make)
            ways = {
                "cold": None,
                "start at S": first_scale(scale),
                "start at 10 S": first_scale(10 * scale),
                "start at S / 10": first_scale(scale / 10),
                "floor at S / 3": {"min_lr": scale / 3},
            }
            for task in (whole, dataclasses.replace(whole, steps=whole.steps // 4)):
                losses = {
                    way: [
                        final_loss(task, functools.partial(build, make=make, config=config), seed)[0] for seed in SEEDS
                    ]
                    for way, config in ways.items()
                }
                cold = losses.pop("cold")
                print(f"{name} {base} {task.steps} steps, S = {scale:.2g}, cold {statistics.mean(cold):.4f}", end="")
                for way, found in losses.items():
                    ratio = statistics.mean(each / other for each, other in zip(found, cold, strict=True))
                    print(f", {way} {ratio:.3f}", end="")
                print(flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:] or RUNS)
