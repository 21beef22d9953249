"""Theorem 1 as printed: the base steps on iterates of its own and never sees the parameters."""

import copy

import numpy as np
import pytest
import pytorch_optimizer
import schedulefree
import torch

from mechanic.torch import Mechanic
from tests.shared import oracle
from tests.torch.oracle_task import BASES, gradient, loss_of, start
from tests.torch.task import scale

OWN = {
    "schedule-free SGD": lambda params: schedulefree.SGDScheduleFree(params, lr=1.0),
    "schedule-free AdamW": lambda params: schedulefree.AdamWScheduleFree(params, lr=1.0),
    "Lookahead": lambda params: pytorch_optimizer.Lookahead(torch.optim.SGD(params, lr=1.0, momentum=0.9)),
    "MADGRAD": lambda params: pytorch_optimizer.MADGRAD(params, lr=1.0),
    "FTRL": lambda params: pytorch_optimizer.FTRL(params, lr=1.0),
    "AccSGD": lambda params: pytorch_optimizer.AccSGD(params, lr=1.0),
    "Ranger": lambda params: pytorch_optimizer.Ranger(params, lr=1.0),
}


def train(weight, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(weight, step).backward()
        optimizer.step()


@pytest.mark.long
@pytest.mark.parametrize("base", BASES)
def test_follows_the_oracle_with_weight_decay_on_the_iterates_of_the_base(base):
    written_here, in_torch, options = BASES[base]
    reference = oracle.Oracle(written_here(lambda t: 1.0), start(), own_iterates=True)
    weight = torch.nn.Parameter(torch.tensor(start()))
    optimizer = Mechanic(in_torch([weight], lr=1.0, **options), own_iterates=True)
    for step in range(200):
        reference.step(gradient(reference.x, step))
        train(weight, optimizer, [step])
        assert scale(optimizer) == pytest.approx(reference.scale, rel=1e-9)
        assert np.linalg.norm(weight.detach().numpy() - reference.x) <= 1e-9 * np.linalg.norm(reference.x)


@pytest.mark.long
def test_without_weight_decay_it_is_algorithm_1():
    weights = [torch.nn.Parameter(torch.tensor(start())) for _ in range(2)]
    for weight, own in zip(weights, (False, True), strict=True):
        base = torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0)
        train(weight, Mechanic(base, config={"forgetting": 0.0}, own_iterates=own), range(100))
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OWN)
def test_parameters_are_the_start_and_s_times_what_the_base_did(name):
    weight, own = (torch.nn.Parameter(torch.tensor(start())) for _ in range(2))
    optimizer, alone = Mechanic(OWN[name]([weight])), OWN[name]([own])
    assert optimizer.param_groups[0]["mechanic_own_iterates"] == 1  # without an option

    def switch(mode):
        """Some bases have a point to train at, and one to evaluate at."""
        getattr(optimizer, mode)()
        getattr(alone, mode, lambda: None)()

    def assert_expected():
        expected = torch.tensor(start()) + scale(optimizer) * (own.detach() - torch.tensor(start()))
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-9)

    before = loss_of(weight, 0).item()
    switch("train")
    for step in range(60):
        optimizer.zero_grad()
        loss_of(weight, step).backward()
        own.grad = weight.grad.clone()
        optimizer.step()
        alone.step()
        assert_expected()
    at_training_point = weight.detach().clone()
    switch("eval")
    assert weight.detach().allclose(at_training_point) == (not hasattr(alone, "eval"))
    assert_expected()
    assert loss_of(weight, 0).item() < before
    switch("train")
    torch.testing.assert_close(weight.detach(), at_training_point, rtol=1e-9, atol=1e-9)


def test_train_and_eval_of_other_bases_do_nothing():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Mechanic(torch.optim.SGD([weight], lr=1.0))
    optimizer.eval()
    optimizer.train()
    assert weight.equal(torch.ones(3))


def test_other_bases_are_not_taken_for_one_of_these():
    optimizer = Mechanic(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=1.0))
    assert "mechanic_own_iterates" not in optimizer.param_groups[0]


def test_a_checkpoint_of_the_other_mode_is_refused():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizers = [Mechanic(torch.optim.SGD([weight], lr=1.0), own_iterates=own) for own in (False, True)]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    for optimizer, state in zip(optimizers, reversed(states), strict=True):
        with pytest.raises(ValueError, match="own_iterates"):
            optimizer.load_state_dict(state)


def test_what_is_not_scaled_cannot_be_frozen():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Mechanic(torch.optim.SGD([weight], lr=1.0), own_iterates=True)
    for _ in range(3):
        weight.square().sum().backward()
        optimizer.step()
    for keep in (optimizer.freeze, optimizer.release):
        with pytest.raises(TypeError, match="iterates of its own"):
            keep()
