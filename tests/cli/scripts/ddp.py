"""DistributedDataParallel under torchrun."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(1024, 64)
    data = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(1))
    sampler = DistributedSampler(data, shuffle=True)
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for inputs, targets in DataLoader(data, batch_size=32, sampler=sampler):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}", losses[-1])
    if dist.get_rank() == 0:
        print("final", sum(losses[-10:]) / 10)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
