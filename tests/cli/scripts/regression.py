"""A polynomial fitted with momentum, in a function with a closure, and with a plateau schedule."""

import argparse

import torch
import torch.optim as optim
from torch.nn import functional as F


def fit(lr, steps):
    weights = torch.tensor([[5.0], [2.0], [-1.0], [0.5]])
    model = torch.nn.Linear(4, 1)
    optimizer = optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=10)
    for step in range(steps):
        x = torch.randn(32, 1)
        features = torch.cat([x**power for power in range(1, 5)], 1)
        target = features @ weights + 5.0

        def closure(features=features, target=target):
            optimizer.zero_grad()
            loss = F.smooth_l1_loss(model(features), target)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        scheduler.step(loss.item())
        if step % 20 == 0:
            print(f"step {step}: {loss.item()!r}")
    x = torch.linspace(-1.5, 1.5, 100)[:, None]
    features = torch.cat([x**power for power in range(1, 5)], 1)
    return F.smooth_l1_loss(model(features), features @ weights + 5.0).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print("final", fit(arguments.lr, arguments.steps))
