"""Figures that known-good runs reached, so that a change for the worse is seen."""

import statistics

import pytest
import pytorch_optimizer
import torch
from torch.nn.functional import cross_entropy

from mechanic import TunerConfig
from mechanic.torch import Mechanic
from tests.torch.task import batch, digits, mlp, scale

pytestmark = pytest.mark.long


def steps_to_half(scales):
    return next(t for t, s in enumerate(scales, 1) if s > scales[-1] / 2)


def run(params, loss, steps, config):
    """SGD under Mechanic; returns S after every step."""
    optimizer = Mechanic(torch.optim.SGD(params, lr=1.0), config=config)
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        scales.append(scale(optimizer))
    return scales


@pytest.mark.parametrize(
    ("config", "after_500", "after_2000", "half_by"),
    [
        (TunerConfig.paper(), 1.7e-2, 1.0e-3, (30, 60)),
        (TunerConfig(), 1.6e-7, 1e-20, (1, 40)),
    ],
    ids=["paper", "default"],
)
def test_quadratic(config, after_500, after_2000, half_by):
    """20 dimensions, eigenvalues from 1/100 to 1, started at all ones: loss as a fraction of its start."""
    x = torch.nn.Parameter(torch.ones(20, dtype=torch.float64))
    eigenvalues = torch.logspace(-2, 0, 20, dtype=torch.float64)
    losses = []

    def loss(step):
        value = (eigenvalues * x * x).sum()
        losses.append(value.item())
        return value

    scales = run([x], loss, 2001, config)
    assert losses[500] / losses[0] <= 1.1 * after_500
    assert losses[2000] / losses[0] <= 1.1 * after_2000
    assert scales[2] > 0
    assert half_by[0] <= steps_to_half(scales) <= half_by[1]


@pytest.mark.parametrize(
    ("config", "splits", "train_loss"),
    [(TunerConfig.paper(), 2, 0.082), (TunerConfig(), 8, 0.02)],
    ids=["paper", "default"],
)
def test_logistic_regression_on_digits(config, splits, train_loss):
    """Standardised pixels; the median over splits. With the defaults, two in eight end on a bad batch."""
    losses, accuracies = zip(*(logistic_regression(config, seed) for seed in range(splits)), strict=True)
    assert statistics.median(losses) <= train_loss
    assert statistics.median(accuracies) >= 0.95


def logistic_regression(config, seed):
    """Train loss and test accuracy after 800 steps on batches of 32."""
    images, labels = digits()
    images = (images - images.mean(0)) / (images.std(0) + 1e-8)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1400], order[1400:]
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 10)

    def loss(step):
        rows = train[torch.randint(1400, (32,), generator=torch.Generator().manual_seed(1000 * seed + step))]
        return cross_entropy(model(images[rows]), labels[rows])

    run(model.parameters(), loss, 800, config)
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        return cross_entropy(model(images[train]), labels[train]).item(), accuracy


@pytest.mark.parametrize(
    ("base", "options", "tolerance"),
    [(pytorch_optimizer.Lion, {}, 0.0), (torch.optim.AdamW, {"eps": 1e-16}, 1e-6)],
    ids=["Lion", "AdamW"],
)
def test_scaling_the_loss_does_not_change_the_scale(base, options, tolerance):
    """Of a base that normalises its gradients."""
    courses = []
    for factor in (1.0, 2.0**13):
        model = mlp(dtype=torch.float64)
        optimizer = Mechanic(base(model.parameters(), lr=1.0, **options))
        course = []
        for step in range(30):
            optimizer.zero_grad()
            images, labels = batch(step, dtype=torch.float64)
            (factor * cross_entropy(model(images), labels)).backward()
            optimizer.step()
            course.append(scale(optimizer))
        courses.append(course)
    assert courses[0] == pytest.approx(courses[1], rel=tolerance, abs=0)
    assert courses[0][-1] > 0
