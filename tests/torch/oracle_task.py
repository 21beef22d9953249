"""The task on which both backends follow the oracle: softmax regression over the digits, with a schedule."""

import functools
import math

import numpy as np
import pytest
import pytorch_optimizer
import torch

from mechanic import TunerConfig
from tests.shared import oracle
from tests.torch.paths import by_default, on_copies
from tests.torch.task import digits, scale

STEPS = 300
BASES = {
    "SGD": (lambda lr: oracle.SGD(lr), torch.optim.SGD, {}),
    "momentum": (lambda lr: oracle.SGD(lr, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "AdamW": (lambda lr: oracle.AdamW(lr, weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
    "Lion": (
        lambda lr: oracle.Lion(lr, weight_decay=0.1),
        pytorch_optimizer.Lion,
        {"weight_decay": 0.1, "weight_decouple": True},
    ),
}
BASES_AND_PATHS = [(base, by_default) for base in BASES] + [(base, on_copies) for base in ("SGD", "momentum", "AdamW")]
every_path = pytest.mark.parametrize(
    ("base", "wrap"), [("AdamW", by_default), ("AdamW", on_copies), ("Lion", by_default)]
)
CONFIGS = {
    "default": (TunerConfig(), {}),
    "paper": (
        TunerConfig.paper(),
        {**oracle.PAPERS_NUMBERS, "departures": oracle.Departures.only_what_must_be()},
    ),
    "nothing settles": (TunerConfig(settle=False), {"departures": oracle.Departures(settling=False)}),
    "nothing forgotten": (TunerConfig(forgetting=0.0), {"departures": oracle.Departures(forgetting=False)}),
    "bounds": (TunerConfig(min_lr=1e-3, max_lr=0.02), {"bounds": (1e-3, 0.02)}),
    "two betas": (
        TunerConfig(betas=(0.9, 0.999), decay=0.1, s_init=1e-3),
        {"betas": (0.9, 0.999), "lam": 0.1, "s_init": 1e-3},
    ),
}


def warmup_cosine(t):
    return (t + 1) / 30 if t < 30 else 0.5 * (1 + math.cos(math.pi * (t - 30) / (STEPS - 30)))


def rows(step):
    return np.random.default_rng(step).integers(0, len(digits()[0]), 32)


def gradient(weight, step):
    """Of the mean cross-entropy over one batch, by hand."""
    images, labels = (t.numpy()[rows(step)] for t in digits(torch.float64))
    logits = images @ weight.T
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    probabilities[np.arange(len(labels)), labels] -= 1
    return probabilities.T @ images / len(labels)


def loss_of(weight, step):
    """The same in torch."""
    (images, labels), chosen = digits(weight.dtype), rows(step)
    return torch.nn.functional.cross_entropy(images[chosen] @ weight.T, labels[chosen])


def start():
    return np.random.default_rng(0).normal(size=(10, 64)) / 8


@functools.cache
def run_oracle(base, config="default"):
    """The course of the base and the config of these names; one for all paths that have to follow it."""
    reference = oracle.Oracle(BASES[base][0](warmup_cosine), start(), **CONFIGS[config][1])
    course = []
    for step in range(STEPS):
        reference.step(gradient(reference.x, step))
        course.append((reference.scale, reference.x))
    return course


def run_mechanic(wrap, base, options, config, dtype, steps=STEPS):
    weight = torch.nn.Parameter(torch.tensor(start(), dtype=dtype))
    optimizer = wrap(base([weight], lr=1.0, **options), config=config)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine)
    course = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(weight, step).backward()
        optimizer.step()
        schedule.step()
        course.append((scale(optimizer), weight.detach().numpy().copy()))
    return course
