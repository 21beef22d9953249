"""A small real task: scikit-learn's digits and an MLP."""

import functools
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from mechanic.tuner import TunerState


@functools.cache
def digits(dtype=torch.float32):
    # Its file, not load_digits(): the import takes 2 s, and many processes of the tests need nothing else of it.
    rows = np.loadtxt(Path(find_spec("sklearn").origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    return torch.tensor(rows[:, :-1] / 16, dtype=dtype), torch.tensor(rows[:, -1].astype(int))


def mlp(*, hidden=32, bias=True, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(64, hidden, bias=bias), torch.nn.ReLU(), torch.nn.Linear(hidden, 10, bias=bias)
    return torch.nn.Sequential(*layers).to(dtype)


def batch(step, size=32, dtype=torch.float32):
    images, labels = digits(dtype)
    chosen = torch.randint(len(images), (size,), generator=torch.Generator().manual_seed(step))
    return images[chosen], labels[chosen]


def backward(model, step, size=32):
    """Fill .grad with the gradient of one batch; returns the loss."""
    images, labels = batch(step, size, next(model.parameters()).dtype)
    loss = cross_entropy(model(images), labels)
    loss.backward()
    return loss.item()


def train(model, optimizer, steps, *, first=0, size=32, scheduler=None):
    """The plain training loop; returns the loss over all the data at its end."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step, size)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return train_loss(model)


@torch.no_grad()
def train_loss(model):
    images, labels = digits(next(model.parameters()).dtype)
    return cross_entropy(model(images), labels).item()


def scale(optimizer):
    """S of the one tuner."""
    return optimizer.param_groups[0]["mechanic_tuner"][4].sum().item()


def values_of(model):
    return [p.detach().clone() for p in model.parameters()]


def learned(optimizer, group=0):
    """The betas and the state of a group's tuner, but for the number of steps that were not finite."""
    rows = [row for row, field in enumerate(TunerState._fields, 1) if field != "nonfinite_steps"]
    return optimizer.param_groups[group]["mechanic_tuner"][[0, *rows]].clone()


def snapshot(model, optimizer):
    """Everything that training has moved, for comparing bit for bit: parameters, Delta, tuner."""
    tensors = [p.detach() for p in model.parameters()]
    tensors += [
        state[key] for state in optimizer.state.values() for key in sorted(state) if torch.is_tensor(state[key])
    ]
    return [t.clone() for t in [*tensors, *(group["mechanic_tuner"] for group in optimizer.param_groups)]]


def pull(optimizer, steps=1):
    """Steps on the gradients of a quadratic around 3."""
    for _ in range(steps):
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
            p.grad = p.detach() - 3
        optimizer.step()


def assert_go_on_alike(*pairs, steps, first=0):
    """Models and their optimizers train on, bit for bit alike."""
    for model, optimizer in pairs:
        train(model, optimizer, steps, first=first)
    assert all(same_bits(snapshot(*pairs[0]), snapshot(*pair)) for pair in pairs[1:])


def same_bits(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
