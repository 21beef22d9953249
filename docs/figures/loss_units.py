"""Final train loss against a factor on the loss: the table "What is not free of units" in how-it-works.md."""

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[2]))

from mechanic.torch import Mechanic
from tests.torch.task import batch, mlp, train_loss

FACTORS = (1e-6, 1e-4, 1e-2, 1.0, 1e3)
ROWS = {
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}, {}),
    "… with decay=0": (torch.optim.SGD, {"momentum": 0.9}, {"decay": 0.0}),
    "AdamW": (torch.optim.AdamW, {"eps": 1e-16}, {}),
}


def final_loss(base, options, config, factor, steps=300):
    model = mlp()
    optimizer = Mechanic(base(model.parameters(), lr=1.0, **options), config=config)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        images, labels = batch(step)
        optimizer.zero_grad()
        (factor * cross_entropy(model(images), labels)).backward()
        optimizer.step()
        schedule.step()
    return train_loss(model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("factor".ljust(24), *(f"{factor:8g}" for factor in FACTORS))
    for name, row in ROWS.items():
        print(name.ljust(24), *(f"{final_loss(*row, factor):8.3f}" for factor in FACTORS))
