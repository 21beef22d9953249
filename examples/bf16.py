"""Train a model whose parameters are bfloat16, all of them, without a float32 master copy.

Towards the end of a schedule steps fall below the last bit of a bfloat16, and bare optimizers stop moving.
Mechanic keeps what rounding cuts off, two bytes per parameter, so small steps add up.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from mechanic.torch import Mechanic

STEPS = 1000


def train(dtype: torch.dtype, lr: float | None = None) -> tuple[float, float]:
    """With Mechanic, or a bare AdamW at ``lr``; returns the final loss, in float32, and the learning rate."""
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=dtype), torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).to(dtype)
    base = torch.optim.AdamW(model.parameters(), lr=lr or 1.0)
    optimizer = base if lr else Mechanic(base)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        rows = torch.randint(len(targets), (64,))
        optimizer.zero_grad()
        cross_entropy(model(inputs[rows]).float(), targets[rows]).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        loss = cross_entropy(model.float()(inputs.float()), targets).item()
    return loss, lr or optimizer.scales()["default"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    loss, lr = train(torch.float32)
    print(f"float32 parameters, Mechanic:  loss {loss:.4f}, learned lr {lr:.2g}")
    print("bfloat16 parameters, Mechanic: loss {:.4f}, learned lr {:.2g}".format(*train(torch.bfloat16)))
    print(f"bfloat16 parameters, AdamW:    loss {train(torch.bfloat16, lr)[0]:.4f} at the lr Mechanic learned")
