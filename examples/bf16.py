"""Train a model whose parameters are bfloat16, all of them, without a float32 master copy.

Towards the end of a schedule steps fall below the last bit of a bfloat16. A bare optimizer loses them, and ends above
what it reaches in float32: the smaller its learning rate, the more. Mechanic keeps what rounding cuts off, two bytes
per parameter, so that small steps add up.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from mechanic.torch import Mechanic

STEPS = 1000
ADAMW_LRS = (0.003, 0.01)


def train(dtype: torch.dtype, lr: float | None) -> float:
    """With a bare AdamW at ``lr``, or with Mechanic if there is none; returns the final loss, in float32."""
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
        return cross_entropy(model.float()(inputs.float()), targets).item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"Train loss after {STEPS} steps on digits:", flush=True)
    for name, lr in {**{f"AdamW at {lr:g}": lr for lr in ADAMW_LRS}, "Mechanic(AdamW)": None}.items():
        single, half = train(torch.float32, lr), train(torch.bfloat16, lr)
        print(f"{name:<15}  float32 {single:.4f}, bfloat16 {half:.4f}", flush=True)
    print("In bfloat16 a bare AdamW loses its small steps to rounding. Mechanic keeps them, and learns its own rate.")
