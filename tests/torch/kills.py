"""Trainings to be killed at any moment: one process, or two ranks under FSDP2. What test_kills.py starts.

    python kills.py one FOLDER
    python kills.py fsdp2 FOLDER RANK RENDEZVOUS

Each says on stdout where it is, goes on from the last whole checkpoint in FOLDER, and waits at its end for stdin to
close before it writes FOLDER/end.pt.
"""

import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic.torch import Mechanic

STEPS = {"one": 160, "fsdp2": 40}
EVERY = 4  # steps between checkpoints
BATCH = 32


def say(step, phase):
    """At once: what is said after a kill cannot be of use, what was said before must not be lost."""
    os.write(1, f"{step} {phase}\n".encode())


class Training:
    def __init__(self, steps, shard=None):
        torch.manual_seed(0)
        self.inputs = torch.randn(512, 32)
        self.targets = (self.inputs @ torch.randn(32, 4)).sin()
        self.model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
        if shard is not None:
            shard(self.model)
        self.optimizer = Mechanic(torch.optim.AdamW(self.model.parameters(), lr=1.0, weight_decay=0.01))
        self.schedule = CosineAnnealingLR(self.optimizer, steps)
        self.order = torch.Generator().manual_seed(1)
        self.steps = steps
        self.done = 0

    def run(self, save, rank=0, ranks=1):
        while self.done < self.steps:
            say(self.done, "gradient")
            chosen = torch.randint(len(self.inputs), (BATCH,), generator=self.order).chunk(ranks)[rank]
            self.optimizer.zero_grad()
            (self.model(self.inputs[chosen]) - self.targets[chosen]).square().mean().backward()
            say(self.done, "step")
            self.optimizer.step()
            self.schedule.step()
            self.done += 1
            if self.done % EVERY == 0:
                say(self.done - 1, "save")
                save()
        say(self.steps, "end")
        sys.stdin.read()


def write_whole(content, path):
    """The file is there with all its content, or not at all, whenever the process is killed."""
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def one(folder):
    training = Training(STEPS["one"])
    parts = {name: getattr(training, name) for name in ("model", "optimizer", "schedule")}
    latest = folder / "latest.pt"

    def content():
        states = {name: part.state_dict() for name, part in parts.items()}
        return {**states, "order": training.order.get_state(), "done": training.done}

    say(-1, "load")
    if latest.exists():
        saved = torch.load(latest, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        training.order.set_state(saved["order"])
        training.done = saved["done"]
    training.run(lambda: write_whole(content(), latest))
    write_whole({**content(), "scales": training.optimizer.scales()}, folder / "end.pt")


def fsdp2(folder, rank, rendezvous):
    from torch import distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    training = Training(STEPS["fsdp2"], shard=fully_shard)

    def content():
        model, optimizer = get_state_dict(training.model, training.optimizer)
        counts = {
            "done": training.done,
            "order": training.order.get_state(),
            "schedule": training.schedule.state_dict(),
        }
        return {"model": model, "optimizer": optimizer, **counts}

    def save():
        unfinished = folder / "unfinished"
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier()
        dcp.save(content(), checkpoint_id=unfinished)  # syncs its files
        if rank == 0:  # all ranks have written theirs
            unfinished.rename(folder / str(training.done))
            sync_folder(folder)
            shutil.rmtree(folder / str(training.done - 2 * EVERY), ignore_errors=True)

    say(-1, "load")
    if saved := [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]:
        state = content()
        dcp.load(state, checkpoint_id=folder / str(max(saved)))
        set_state_dict(
            training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        training.done = state["done"]
        training.order.set_state(state["order"])
        training.schedule.load_state_dict(state["schedule"])
    dist.barrier()  # or a rank would see what the other has saved since
    training.run(save, rank, ranks=2)
    # Every rank writes its own shards.
    locals_of = {name: p.to_local().detach() for name, p in training.model.named_parameters()}
    entries = {
        name: {key: getattr(value, "_local_tensor", value) for key, value in training.optimizer.state[p].items()}
        for name, p in training.model.named_parameters()
    }
    tuners = [group["mechanic_tuner"] for group in training.optimizer.param_groups]
    end = {"model": locals_of, "optimizer": entries, "tuners": tuners, "scales": training.optimizer.scales()}
    write_whole(end, folder / f"end {rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, where, *rest = sys.argv[1:]
    if kind == "one":
        one(Path(where))
    else:
        fsdp2(Path(where), int(rest[0]), rest[1])
