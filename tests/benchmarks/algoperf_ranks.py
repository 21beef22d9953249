"""What the two ranks of test_algoperf.py do. It imports little, as each rank has to."""

import os
import warnings
from pathlib import Path

import torch
from torch import distributed as dist

from benchmarks.algoperf import runner
from benchmarks.algoperf.workloads import WORKLOADS

STEPS, EVAL_EVERY = 20, 10


def final(run):
    """Parameters, and all that the optimizer has learned."""
    optimizer_state, model, _ = run
    state = optimizer_state["optimizer"].state_dict()["state"]
    tensors = [value for of_one in state.values() for value in of_one.values() if torch.is_tensor(value)]
    scale = optimizer_state["optimizer"].scales()["default"]
    return [*runner.bare(model).state_dict().values(), *tensors, torch.tensor(scale)]


def train_whole(name, submission):
    return runner.train_once(WORKLOADS[name](STEPS), submission, STEPS, EVAL_EVERY)


def train_interrupted(name, submission, folder):
    runner.train_once(WORKLOADS[name](STEPS), submission, EVAL_EVERY, EVAL_EVERY, folder=folder)
    return runner.train_once(WORKLOADS[name](STEPS), submission, STEPS, EVAL_EVERY, folder=folder)


def train_on_rank(rank, folder, names):
    """One run through, and one that is interrupted; rank 0 writes how both end on both ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    submission = runner.load_submission()
    found = {}
    for name in names:
        saved = Path(folder) / name
        saved.mkdir(exist_ok=True)
        ends = final(train_whole(name, submission)), final(train_interrupted(name, submission, saved))
        found[name] = [None, None]
        dist.all_gather_object(found[name], ends)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an orderly exit
