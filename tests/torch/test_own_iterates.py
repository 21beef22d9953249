"""Theorem 1 as printed: the base steps on iterates of its own and never sees the parameters."""

import copy
import io

import numpy as np
import pytest
import pytorch_optimizer
import schedulefree
import torch

from mechanic.torch import Mechanic
from tests.shared import oracle
from tests.torch.oracle_task import BASES, gradient, rows, start
from tests.torch.task import digits, scale

SCHEDULE_FREE = {"SGD": schedulefree.SGDScheduleFree, "AdamW": schedulefree.AdamWScheduleFree}
OTHERS = {
    "Lookahead": lambda params: pytorch_optimizer.Lookahead(torch.optim.SGD(params, lr=1.0, momentum=0.9)),
    "MADGRAD": lambda params: pytorch_optimizer.MADGRAD(params, lr=1.0),
    "FTRL": lambda params: pytorch_optimizer.FTRL(params, lr=1.0),
    "AccSGD": lambda params: pytorch_optimizer.AccSGD(params, lr=1.0),
    "Ranger": lambda params: pytorch_optimizer.Ranger(params, lr=1.0),
}


def loss_of(weight, step):
    images, labels = digits(weight.dtype)
    return torch.nn.functional.cross_entropy(images[rows(step)] @ weight.T, labels[rows(step)])


def train(weight, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(weight, step).backward()
        optimizer.step()


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


def test_without_weight_decay_it_is_algorithm_1():
    weights = [torch.nn.Parameter(torch.tensor(start())) for _ in range(2)]
    for weight, own in zip(weights, (False, True), strict=True):
        base = torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0)
        train(weight, Mechanic(base, config={"forgetting": 0.0}, own_iterates=own), range(100))
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_parameters_are_the_start_and_s_times_what_schedule_free_did(name):
    weight, own = (torch.nn.Parameter(torch.tensor(start())) for _ in range(2))
    optimizer = Mechanic(SCHEDULE_FREE[name]([weight], lr=1.0))
    alone = SCHEDULE_FREE[name]([own], lr=1.0)
    optimizer.train()
    alone.train()

    def expected():
        return torch.tensor(start()) + scale(optimizer) * (own.detach() - torch.tensor(start()))

    for step in range(60):
        optimizer.zero_grad()
        loss_of(weight, step).backward()
        own.grad = weight.grad.clone()
        optimizer.step()
        alone.step()
        torch.testing.assert_close(weight.detach(), expected(), rtol=1e-9, atol=1e-9)
    at_training_point = weight.detach().clone()
    optimizer.eval()
    alone.eval()
    assert not weight.detach().allclose(at_training_point)
    torch.testing.assert_close(weight.detach(), expected(), rtol=1e-9, atol=1e-9)
    optimizer.train()
    torch.testing.assert_close(weight.detach(), at_training_point, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OTHERS)
def test_parameters_are_the_start_and_s_times_what_the_base_did(name):
    weight, own = (torch.nn.Parameter(torch.tensor(start())) for _ in range(2))
    optimizer, alone = Mechanic(OTHERS[name]([weight])), OTHERS[name]([own])
    before = loss_of(weight, 0).item()
    for step in range(60):
        optimizer.zero_grad()
        loss_of(weight, step).backward()
        own.grad = weight.grad.clone()
        optimizer.step()
        alone.step()
        expected = torch.tensor(start()) + scale(optimizer) * (own.detach() - torch.tensor(start()))
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-9)
    assert loss_of(weight, 0).item() < before


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_learns_and_resumes_bit_for_bit(name):
    def fresh():
        weight = torch.nn.Parameter(torch.tensor(start(), dtype=torch.float32))
        optimizer = Mechanic(SCHEDULE_FREE[name]([weight], lr=1.0))
        optimizer.train()
        return weight, optimizer

    weight, optimizer = fresh()
    before = loss_of(weight, 0).item()
    train(weight, optimizer, range(200))
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), weight.detach()], file)
    train(weight, optimizer, range(200, 220))
    assert loss_of(weight, 0).item() < 0.2 * before

    file.seek(0)
    state, values = torch.load(file, weights_only=True)
    again, continued = fresh()
    again.data.copy_(values)
    continued.load_state_dict(state)
    train(again, continued, range(200, 220))
    assert again.equal(weight)
    assert continued.scales() == optimizer.scales()


def test_train_and_eval_of_other_bases_do_nothing():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Mechanic(torch.optim.SGD([weight], lr=1.0))
    optimizer.eval()
    optimizer.train()
    assert weight.equal(torch.ones(3))


@pytest.mark.parametrize("base", [*SCHEDULE_FREE.values(), *OTHERS.values()], ids=[*SCHEDULE_FREE, *OTHERS])
def test_known_bases_are_recognised_without_an_option(base):
    optimizer = Mechanic(base([torch.nn.Parameter(torch.ones(3))]))
    assert optimizer.param_groups[0]["mechanic_own_iterates"] == 1


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
