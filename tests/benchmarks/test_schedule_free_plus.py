"""Our writing of ScheduleFree+ follows its rule, and trains."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.suite.schedule_free_plus import AdamScheduleFreePlus
from tests.torch.task import batch, mlp, train


def test_it_follows_its_rule():
    """The loss is y^2 / 2; in one dimension everything can be written down."""
    p = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = AdamScheduleFreePlus([p])
    x = y = z = 2.0
    mean = square = weights = largest = 0.0
    for step in range(1, 20):
        loss, grad = y * y / 2, y
        lr = max(0.0, loss + 0.9 * grad * (z - x)) / (math.sqrt(math.pi / 2) * abs(grad))
        mean, square = 0.9 * mean + 0.1 * grad, 0.95 * square + 0.05 * grad**2
        z -= lr * mean / (1 - 0.9**step) / (math.sqrt(square / (1 - 0.95**step)) + 1e-8)
        largest = max(largest, lr)
        weights += largest**2
        x += largest**2 / weights * (z - x)
        y = 0.9 * x + 0.1 * z
        p.grad = p.detach().clone()
        optimizer.step(lambda loss=loss: loss)
        assert p.item() == pytest.approx(y, rel=1e-12)
    optimizer.eval()
    assert p.item() == pytest.approx(x, rel=1e-12)
    optimizer.train()
    assert p.item() == pytest.approx(y, rel=1e-12)


def test_after_a_warm_up_it_learns_digits_without_a_learning_rate():
    model = mlp()
    optimizer = AdamScheduleFreePlus(model.parameters(), warm_up=5)
    for step in range(200):
        images, labels = batch(step)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss.detach)
    optimizer.eval()
    assert cross_entropy(model(batch(0)[0]), batch(0)[1]) < 1.0


def test_without_the_loss_it_says_what_it_needs():
    model = mlp()
    with pytest.raises(ValueError, match="closure that returns the loss"):
        train(model, AdamScheduleFreePlus(model.parameters()), 1)
