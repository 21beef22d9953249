"""Record a run and draw it: the loss, the learned scale S and the effective learning rate, over the steps.

Writes ``run.png`` into the current folder, or where the argument says.
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from mechanic.torch import Mechanic

STEPS, WARM_UP = 600, 60


def train() -> dict[str, list[float]]:
    """An MLP on digits under a warm-up and a cosine; what was seen on every step."""
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - WARM_UP)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], [WARM_UP])
    seen: dict[str, list[float]] = {"loss": [], "S": [], "effective": []}
    for _ in range(STEPS):
        rows = torch.randint(len(targets), (64,))
        loss = cross_entropy(model(inputs[rows]), targets[rows], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen["loss"].append(loss.item())
        seen["S"].append(optimizer.scales()["default"])
        seen["effective"].append(optimizer.learning_rates()["default"])
        schedule.step()
    return seen


def draw(seen: dict[str, list[float]], path: str) -> None:
    steps = np.arange(1, len(seen["loss"]) + 1)
    look = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(look):
        figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(6.4, 4.8), layout="constrained")
        width = 21
        mean = np.convolve(seen["loss"], np.ones(width) / width, "valid")
        above.plot(steps, seen["loss"], color="0.8", linewidth=0.8, label="one batch")
        above.plot(steps[width // 2 : -(width // 2)], mean, color="black", linewidth=1.6, label=f"mean of {width}")
        above.set(yscale="log", ylabel="train loss", yticks=[0.5, 1, 2], yticklabels=["0.5", "1", "2"])
        above.minorticks_off()
        below.plot(steps, seen["S"], color="#0072B2", linewidth=1.6, label="S, learned")
        below.plot(steps, seen["effective"], color="#D55E00", linewidth=1.6, label="effective: S × schedule")
        below.axvspan(0, WARM_UP, color="0.95", zorder=0)
        below.text(WARM_UP, 0.02, " warm-up ends", color="0.5", transform=below.get_xaxis_transform())
        below.set(ylabel="learning rate", xlabel="step", xlim=(0, len(steps)), ylim=(0, None))
        for panel in (above, below):
            panel.legend(frameon=False, loc="upper right")
        figure.savefig(path, dpi=160)
        plt.close(figure)


if __name__ == "__main__":
    torch.set_num_threads(1)
    seen = train()
    path = sys.argv[1] if len(sys.argv) > 1 else "run.png"
    draw(seen, path)
    print(f"final loss {np.mean(seen['loss'][-60:]):.4f} at a learned rate of {seen['S'][-1]:.2g}; drawn to {path}")
