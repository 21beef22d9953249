"""Autocast in bfloat16 and a gradient scaler, around a fused AdamW, with a schedule of one cycle."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--steps", type=int, default=80)
args = parser.parse_args()
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr / 25, weight_decay=0.05, fused=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps)
scaler = torch.amp.GradScaler("cpu")
losses = []
for step in range(args.steps):
    rows = torch.randint(len(targets), (64,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
print("final", sum(losses[-10:]) / 10)
