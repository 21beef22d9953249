"""Calls the submission as AlgoPerf's ``submission_runner.py`` does, with evaluations after so many steps.

AlgoPerf evaluates after so many seconds, which cannot be repeated. And after a restart it begins its data anew, where
this goes on with the batch that is next.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.algoperf.workload import Digits, spec

PATH = Path(__file__).parents[2] / "algoperf" / "self_tuning" / "mechanic_nadamw" / "submission.py"


def load_submission() -> Any:
    """The module submission.py, which finds the real ``algoperf.spec`` or our stand-in for it."""
    if "algoperf.spec" not in sys.modules:
        package = types.ModuleType("algoperf")
        package.spec = spec  # type: ignore[attr-defined]
        sys.modules.update({"algoperf": package, "algoperf.spec": spec})
    found = importlib.util.spec_from_file_location("mechanic_nadamw_submission", PATH)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def random_states(*seed: int, count: int) -> list[Any]:
    return list(np.random.SeedSequence(seed).generate_state(2 * count).reshape(count, 2) % 2**31)


def train_once(
    workload: Digits,
    submission: Any,
    steps: int,
    eval_every: int,
    seed: int = 0,
    folder: Path | None = None,
) -> tuple[dict[str, Any], Any, list[tuple[int, dict[str, float]]]]:
    """Optimizer state, model, and what every evaluation found. With a folder it saves there, and continues."""
    data_rng, optimizer_rng, model_rng = random_states(seed, count=3)
    queue = workload._build_input_queue(data_rng, "train", data_dir="", global_batch_size=workload.batch_size)
    model, model_state = workload.init_model_fn(model_rng)
    optimizer_state = submission.init_optimizer_state(workload, model, model_state, None, optimizer_rng)
    results: list[tuple[int, dict[str, float]]] = []
    first = 0
    if folder is not None and (folder / "checkpoint").exists():
        model, first, results = restore(folder, optimizer_state, model)
        queue = itertools.islice(queue, first, None)
    for step in range(first, steps):
        select_rng, update_rng, prepare_rng, eval_rng = random_states(seed, step, count=4)
        batch = submission.data_selection(workload, queue, optimizer_state, model, model_state, None, step, select_rng)
        shared = {
            "workload": workload,
            "current_params_types": workload.model_params_types,
            "hyperparameters": None,
            "loss_type": workload.loss_type,
            "eval_results": results,
        }
        optimizer_state, model, model_state = submission.update_params(
            current_param_container=model,
            model_state=model_state,
            batch=batch,
            optimizer_state=optimizer_state,
            global_step=step,
            rng=update_rng,
            train_state=types.MappingProxyType({}),
            **shared,
        )
        if (step + 1) % eval_every == 0 or step + 1 == steps:
            optimizer_state, model, model_state = submission.prepare_for_eval(
                current_param_container=model,
                model_state=model_state,
                optimizer_state=optimizer_state,
                global_step=step + 1,
                rng=prepare_rng,
                **shared,
            )
            found = workload.eval_model(workload.eval_batch_size, model, model_state, eval_rng, "", None, step + 1)
            results.append((step + 1, found))
            if folder is not None:
                save(folder, optimizer_state, model, step + 1, results)
    return optimizer_state, model, results


def bare(model: Any) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


def save(folder: Path, optimizer_state: dict[str, Any], model: Any, step: int, results: list[Any]) -> None:
    """As AlgoPerf does: rank 0, and of the optimizer state what each entry's ``state_dict`` gives."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        state = {
            "model_params": bare(model).state_dict(),
            "optimizer_state": {key: value.state_dict() for key, value in optimizer_state.items()},
            "global_step": step,
            "eval_results": results,
        }
        torch.save(state, folder / "checkpoint")
    if dist.is_initialized():
        dist.barrier()


def restore(folder: Path, optimizer_state: dict[str, Any], model: Any) -> tuple[Any, int, list[Any]]:
    """As AlgoPerf does: every entry is loaded in place, and the model comes back without DDP."""
    state = torch.load(folder / "checkpoint", weights_only=True)
    model = bare(model)
    model.load_state_dict(state["model_params"])
    for key, value in optimizer_state.items():
        value.load_state_dict(state["optimizer_state"][key])
    return model, state["global_step"], state["eval_results"]
