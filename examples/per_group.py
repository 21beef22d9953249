"""A scale per part of a model, where the parts want learning rates a hundredfold apart.

The embedding's weights are kept in hundredths, so the learning rate that suits it is a hundred times that of the body.
One learning rate for both is a compromise, tuned or learned; one tuner per group is not.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from mechanic.torch import Mechanic

STEPS = 400


class Classifier(nn.Module):
    """Every pixel has one of 17 grey values; each value has an embedding, and the body reads all 64 of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(17, 4)
        nn.init.normal_(self.embedding.weight, std=100.0)
        self.body = nn.Sequential(nn.Linear(64 * 4, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(pixels).flatten(1) / 100)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train to the end of a cosine and return the loss over all the data."""
    images, labels = load_digits(return_X_y=True)
    pixels, targets = torch.tensor(images, dtype=torch.long), torch.tensor(labels)
    generator = torch.Generator().manual_seed(0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        rows = torch.randint(len(targets), (64,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(pixels[rows]), targets[rows]).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return cross_entropy(model(pixels), targets).item()


def learned(*, apart: bool) -> tuple[float, dict[str, float]]:
    """Train with Mechanic; returns the final loss and the learned scales."""
    model = Classifier()
    groups = [
        {"params": model.embedding.parameters(), "tuner": "embedding" if apart else "all"},
        {"params": model.body.parameters(), "tuner": "body" if apart else "all"},
    ]
    optimizer = Mechanic(torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0))
    return train(model, optimizer), optimizer.scales()


def best_of_a_grid() -> tuple[float, float]:
    """Nine learning rates for the whole model; returns the lowest final loss and its learning rate."""
    results = []
    for lr in torch.logspace(-4, 0, 9).tolist():
        model = Classifier()
        results.append((train(model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)), lr))
    return min(results)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("One rate for all is a compromise: the embedding wants a rate a hundred times that of the body.", flush=True)
    for apart in (False, True):
        loss, scales = learned(apart=apart)
        print(
            f"loss {loss:.5f} with", ", ".join(f"{name} at {scale:.2g}" for name, scale in scales.items()), flush=True
        )
    loss, lr = best_of_a_grid()
    print(f"loss {loss:.5f} with the best of nine learning rates for all, {lr:.2g}")
    print("So a tuner per group beats any rate for all, while one tuner for all may do worse than the best of a grid.")
