"""Optimizer classes of one's own: a subclass of torch's with a method more, one from scratch, and LBFGS at the end."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import SGD, Optimizer


class Counting(SGD):
    def __init__(self, params, lr, *, label):
        super().__init__(params, lr=lr, momentum=0.9)
        self.label = label

    def describe(self):
        return f"{self.label} with {sum(p.numel() for g in self.param_groups for p in g['params'])} weights"


class Lion(Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_(torch.sign(m * beta1 + p.grad * (1 - beta1)), alpha=group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--steps", type=int, default=80)
args = parser.parse_args()
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
body, head = nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 10)
optimizers = Lion(body.parameters(), lr=args.lr), Counting(head.parameters(), args.lr * 10, label="head")
print(optimizers[1].describe(), isinstance(optimizers[1], Counting), isinstance(optimizers[1], SGD))
losses = []
for step in range(args.steps):
    rows = torch.randint(len(targets), (64,))
    loss = nn.functional.cross_entropy(head(body(inputs[rows])), targets[rows])
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, loss.item())

with torch.no_grad():
    features = body(inputs)
polish = torch.optim.LBFGS((p for p in head.parameters()), lr=0.1, max_iter=3)


def closure():
    polish.zero_grad()
    loss = nn.functional.cross_entropy(head(features), targets)
    loss.backward()
    return loss


print("polished", polish.step(closure).item())
print("final", sum(losses[-10:]) / 10)
