"""Sharded training with FSDP2, checkpoints that reshard, and a restart where it left off.

    torchrun --nproc-per-node 2 examples/fsdp2.py --checkpoints /tmp/checkpoints

Run it again on another number of processes and it continues from the last checkpoint. Mechanic adds one all-reduce of
40 bytes to a step; its state is sharded and saved with the optimizer's.

torchrun can also restart it when a rank dies. Its ranks then need a new store, or they may look for the dead ones:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --max-restarts 4 --nproc-per-node 2 examples/fsdp2.py ...
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from mechanic.torch import Mechanic

BATCH = 96  # of all ranks together


def build() -> tuple[nn.Module, Mechanic]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model, Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))


def state_of(model: nn.Module, optimizer: Mechanic) -> dict[str, object]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save(model: nn.Module, optimizer: Mechanic, folder: Path, step: int) -> None:
    dcp.save(state_of(model, optimizer), checkpoint_id=folder / str(step))
    if dist.get_rank() == 0:  # named only once it is whole
        (folder / "latest.new").write_text(str(step))
        (folder / "latest.new").rename(folder / "latest")


def resume(model: nn.Module, optimizer: Mechanic, folder: Path) -> int:
    """Load the last whole checkpoint, if there is one; returns how many steps it has behind it."""
    if not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder / str(step))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--checkpoints", type=Path, required=True)
    arguments = parser.parse_args()

    # A rank that waits this long for another fails, and torchrun restarts the job.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=1))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {ranks} is process {os.getpid()}", flush=True)
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model, optimizer = build()
    arguments.checkpoints.mkdir(parents=True, exist_ok=True)
    first = resume(model, optimizer, arguments.checkpoints)

    for step in range(first, arguments.steps):
        rows = torch.randint(len(targets), (BATCH,), generator=torch.Generator().manual_seed(step))
        rows = rows.chunk(ranks)[rank]
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, scale {optimizer.scales()['default']:.4f}", flush=True)
        if (step + 1) % arguments.every == 0:
            save(model, optimizer, arguments.checkpoints, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
