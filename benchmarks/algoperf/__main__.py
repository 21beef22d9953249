"""``python -m benchmarks.algoperf``: 300 steps of the submission on each small workload, recorded.

Beside it run its own base, schedule and clipping without Mechanic, at learning rates of a grid. It takes 4 minutes, and
overwrites ``benchmarks/records/algoperf/algoperf.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.algoperf.runner import load_submission, train_once
from benchmarks.algoperf.workloads import WORKLOADS
from benchmarks.suite.record import ROOT, commit, environment

STEPS, EVAL_EVERY, SEEDS = 300, 50, (0, 1, 2)
GRID = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
RECORDS = ROOT / "benchmarks" / "records" / "algoperf" / "algoperf.jsonl"


def at_rate(submission: Any, lr: float) -> Any:
    """The same submission with the bare base at this learning rate."""

    def init_optimizer_state(workload: Any, model_params: Any, *rest: Any) -> dict[str, Any]:
        base = submission.nadamw(model_params, lr)
        schedule = LambdaLR(base, lambda step: submission.share_of_peak(step, workload.step_hint))
        return {"optimizer": base, "scheduler": schedule}

    return SimpleNamespace(**{**vars(submission), "init_optimizer_state": init_optimizer_state})


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.algoperf", description=__doc__).parse_args()
    torch.set_num_threads(1)
    submission, made_by = load_submission(), environment(commit())
    contenders = {None: submission} | {lr: at_rate(submission, lr) for lr in GRID}
    lines = []
    for name, workload in WORKLOADS.items():
        for lr, contender in contenders.items():
            for seed in SEEDS:
                began = time.monotonic()
                state, _, results = train_once(workload(STEPS), contender, STEPS, EVAL_EVERY, seed)
                record = {
                    "workload": name,
                    "contender": "submission" if lr is None else "bare base",
                    "lr": lr,
                    "seed": seed,
                    "steps": STEPS,
                    "evaluations": [{"step": step, **found} for step, found in results],
                    "learned_scale": state["optimizer"].scales()["default"] if lr is None else None,
                    "seconds": round(time.monotonic() - began, 1),
                    **made_by,
                }
                lines.append(json.dumps(record))
                last = results[-1][1]
                print(f"{name}, lr {lr}, seed {seed}: train {last['train/loss']:.4f}, {last['validation/loss']:.4f}")
    RECORDS.parent.mkdir(exist_ok=True)
    RECORDS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
