"""A training function that can be tried with and without Mechanic, on a grid if you like:

    mechanic try examples/own_training.py:train --lr 3e-3 --grid

It takes a function that builds the optimizer and yields the loss of every step; the rest is yours.
"""

import functools

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

STEPS = 300


def train(make_optimizer):
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = make_optimizer(model.parameters(), weight_decay=0.1)  # all but the learning rate
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        rows = torch.randint(len(targets), (64,))
        loss = cross_entropy(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()


if __name__ == "__main__":
    *_, last = train(functools.partial(torch.optim.AdamW, lr=3e-3))
    print(f"last loss {last:.3f} with AdamW at 0.003; {__doc__.splitlines()[2].strip()} compares it with Mechanic")
