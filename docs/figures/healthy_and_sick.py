"""Healthy and sick curves of S, for troubleshooting.md. Half a minute on a CPU.

python docs/figures/healthy_and_sick.py
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from mechanic.torch import Mechanic

HERE = Path(__file__).parent
BLUE = "#0072B2"
LOOK = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",
    "svg.hashsalt": "mechanic",
}
Seen = tuple[list[float], list[float], list[float]]  # losses, S and effective learning rates, by step


def run(
    model: nn.Module,
    loss_at: Callable[[int], Tensor],
    steps: int,
    *,
    warm_up: int = 0,
    constant: bool = False,
    spoil: Callable[[int], None] = lambda step: None,
    weight_decay: float = 0.01,
    lr: float | None = None,
) -> Seen:
    """Train with Mechanic around AdamW, or AdamW at ``lr``; ``spoil`` may change the gradients of a step."""
    base = torch.optim.AdamW(model.parameters(), lr=lr or 1.0, weight_decay=weight_decay)
    optimizer = base if lr else Mechanic(base)
    schedule = CosineAnnealingLR(optimizer, steps - warm_up)
    if warm_up:
        schedule = SequentialLR(optimizer, [LinearLR(optimizer, 1 / warm_up, total_iters=warm_up), schedule], [warm_up])
    if constant:
        schedule = LambdaLR(optimizer, lambda step: 1.0)
    losses, scales, rates = [], [], []
    for step in range(steps):
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        spoil(step)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if isinstance(optimizer, Mechanic):
            scales.append(optimizer.scales()["default"])
            rates.append(optimizer.learning_rates()["default"])
    return losses, scales, rates


def digits(steps: int, spoil: Callable[[nn.Module, int], None] = lambda model, step: None, **options) -> Seen:
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def loss_at(step: int) -> Tensor:
        rows = torch.randint(len(targets), (64,), generator=torch.Generator().manual_seed(step))
        return cross_entropy(model(inputs[rows]), targets[rows], label_smoothing=0.1)

    return run(model, loss_at, steps, spoil=lambda step: spoil(model, step), **options)


def plateau(steps: int, lr: float | None = None) -> Seen:
    """A regression on sin(w·x), whose gradients are mostly noise until the network has found w."""
    torch.manual_seed(0)
    inputs = torch.randn(2000, 20)
    targets = torch.sin(inputs @ torch.randn(20)).unsqueeze(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def loss_at(step: int) -> Tensor:
        rows = torch.randint(len(targets), (64,), generator=torch.Generator().manual_seed(step))
        return mse_loss(model(inputs[rows]), targets[rows])

    return run(model, loss_at, steps, lr=lr)


def swinging(steps: int) -> Seen:
    """A quadratic without noise at a constant learning rate."""
    torch.manual_seed(0)
    point = nn.Linear(20, 1, bias=False)
    curvature = torch.logspace(-2, 0, 20)
    return run(
        point, lambda step: (curvature * (point.weight - 1).square()).sum() / 2, steps, constant=True, weight_decay=0.0
    )


def poisoned(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.fill_(torch.nan)


def one_huge(model: nn.Module, step: int) -> None:
    if step == 150:
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= 1e6


def smoothed(values: list[float], width: int = 9) -> np.ndarray:
    """A running mean, of the logarithms: losses here fall by orders of magnitude."""
    padded = np.pad(np.log(values), width // 2, mode="edge")
    return np.exp(np.convolve(padded, np.ones(width) / width, "valid"))


def draw(panels: dict[str, Seen], name: str) -> None:
    with plt.rc_context(LOOK):
        rows = len(panels) // 2
        figure, axes = plt.subplots(rows, 2, figsize=(7.2, 2.3 * rows))
        for panel, (title, (losses, scales, rates)) in zip(axes.flat, panels.items(), strict=True):
            panel.plot(smoothed(losses), color="0.65", linewidth=1.2)
            panel.set(title=title, yscale="log", xlabel="step")
            panel.set_ylabel("train loss", color="0.5")
            right = panel.twinx()
            right.plot(scales, color=BLUE, linewidth=1.8)
            right.set_ylabel("S", color=BLUE)
            if max(scales) == 0:
                right.set_ylim(-0.01, 0.1)
            else:
                right.plot(rates, color=BLUE, linewidth=1.0, linestyle=":")
                right.set(yscale="log", ylim=(max(scales) / 300, max(scales) * 1.5))
            if max(losses) < 10 * min(losses):
                panel.set_ylim(min(smoothed(losses)) / 1.2, max(smoothed(losses)) * 1.2)
                panel.yaxis.set_major_formatter("{x:g}")
                panel.set_yticks([tick for tick in (0.3, 0.4, 0.5, 0.7, 1, 2) if panel.get_ylim()[0] < tick])
            for axis in (panel, right):
                axis.minorticks_off()
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
    for title, (losses, scales, _) in panels.items():
        print(f"{title}: loss {losses[0]:.3g} to {losses[-1]:.3g}, S {scales[10]:.2g} at step 10, ", end="")
        print(f"{scales[len(scales) // 2]:.2g} halfway, {scales[-1]:.2g} at the end")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Mechanic warns of what the sick runs show
    draw({"healthy, cosine": digits(400), "healthy, warm-up and cosine": digits(400, warm_up=60)}, "healthy")
    sick = {
        "1. S stays 0": digits(400, poisoned),
        "2. S stays low on a plateau": plateau(600),
        "3. one gradient × 1e6": digits(400, one_huge),
        "4. a constant learning rate": swinging(400),
    }
    draw(sick, "sick")
    print("2, mean of the last 60 losses: Mechanic", f"{np.mean(sick['2. S stays low on a plateau'][0][-60:]):.2f}")
    for lr in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1):
        print(f"  AdamW at {lr:g}: {np.mean(plateau(600, lr)[0][-60:]):.2f}")
