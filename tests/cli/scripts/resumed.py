"""Saves in mid-training and goes on from the file with objects that are new; checks what it was given."""

import argparse
import copy
import pickle
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--steps", type=int, default=80)
args = parser.parse_args()
images, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr)
    if not isinstance(optimizer, torch.optim.RMSprop):
        raise TypeError(f"the schedule is for RMSprop, got {type(optimizer)}")
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.steps)


def train(model, optimizer, scheduler, steps):
    losses = []
    for step in steps:
        rows = torch.randint(len(targets), (64,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(step, loss.item())
    return losses


half = args.steps // 2
first = build()
train(*first, range(half))
twin = copy.deepcopy(first)
pickle.dumps(twin[1])
train(*twin, range(half, half + 1))
with tempfile.TemporaryDirectory() as folder:
    names = "model", "optimizer", "scheduler"
    torch.save({name: part.state_dict() for name, part in zip(names, first, strict=True)}, Path(folder, "last.pt"))
    saved = torch.load(Path(folder, "last.pt"), weights_only=True)
second = build()
for name, part in zip(names, second, strict=True):
    part.load_state_dict(saved[name])
print("final", sum(train(*second, range(half, args.steps))[-10:]) / 10)
