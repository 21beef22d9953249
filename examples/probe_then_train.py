"""Let Mechanic find the learning rate, then go on with the plain optimizer and its schedule.

What it costs after the probe is what the plain optimizer costs: no further memory, no further work.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from mechanic.torch import Mechanic

PROBE, STEPS = 100, 400


def main() -> float:
    """Returns the final loss over all the data."""
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def train(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> None:
        for _ in range(steps):
            rows = torch.randint(len(targets), (64,))
            optimizer.zero_grad()
            cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
            scheduler.step()

    mechanic = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(mechanic, STEPS)
    train(mechanic, scheduler, PROBE)
    print(f"learned after {PROBE} steps: a peak learning rate of {mechanic.learned_rates()['default']:.2g}")

    optimizer = mechanic.release()  # the AdamW from above, its learning rate set
    # A new scheduler makes its first step by itself, hence - 1.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, last_epoch=scheduler.last_epoch - 1)
    print(f"{type(optimizer).__name__} goes on at lr {optimizer.param_groups[0]['lr']:.2g}")
    train(optimizer, scheduler, STEPS - PROBE)

    with torch.no_grad():
        loss = cross_entropy(model(inputs), targets).item()
    print(f"final loss {loss:.4f}; {STEPS - PROBE} of {STEPS} steps cost what plain AdamW costs")
    return loss


if __name__ == "__main__":
    main()
