"""DistributedDataParallel in processes that the script spawns itself."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def worker(rank, world_size, store, args):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    losses = []
    torch.manual_seed(rank)
    for step in range(args.steps):
        inputs = torch.randn(32, 8)
        loss = (model(inputs) - inputs.prod(1, keepdim=True).tanh() - inputs[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(step, loss.item(), flush=True)
    if rank == 0:
        print("final", sum(losses[-10:]) / 10, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (arguments.ranks, os.path.join(folder, "store"), arguments), nprocs=arguments.ranks)
