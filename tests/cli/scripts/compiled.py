"""A compiled model. The backend is a small one, so that nothing waits for a C++ compiler."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--backend", default="aot_eager")
args = parser.parse_args()
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), backend=args.backend)
optimizer = torch.optim.NAdam(model.parameters(), lr=args.lr, foreach=True)
losses = []
for step in range(args.steps):
    rows = torch.randint(len(targets), (64,))
    loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, loss.item())
print("final", sum(losses[-10:]) / 10)
