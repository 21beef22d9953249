"""Held-out feedback: one batch says how to scale, another feeds the base."""

import numpy as np
import pytest
import torch

from mechanic.torch import Mechanic
from tests.shared import oracle
from tests.torch.oracle_task import BASES, every_path, gradient, loss_of, start
from tests.torch.task import scale

EVERY = 3  # steps with an observation among those without


@pytest.mark.long
@every_path
def test_observed_feedback_follows_the_oracle(base, wrap):
    written_here, in_torch, options = BASES[base]
    reference = oracle.Oracle(written_here(lambda t: 1.0), start())
    weight = torch.nn.Parameter(torch.tensor(start()))
    optimizer = wrap(in_torch([weight], lr=1.0, **options))
    for step in range(100):
        observed = gradient(reference.x, 1000 + step) if step % EVERY else None
        reference.step(gradient(reference.x, step), observed)
        if step % EVERY:
            loss_of(weight, 1000 + step).backward()
            optimizer.observe()
        loss_of(weight, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert scale(optimizer) == pytest.approx(reference.scale, rel=1e-9)
        assert np.linalg.norm(weight.detach().numpy() - reference.x) <= 1e-9 * np.linalg.norm(reference.x)


def trained(steps, *, observing):
    weight = torch.nn.Parameter(torch.tensor(start(), dtype=torch.float32))
    optimizer = Mechanic(torch.optim.AdamW([weight], lr=1.0))
    for step in range(steps):
        if observing:
            loss_of(weight, step).backward()
            optimizer.observe()
            assert weight.grad is None
        loss_of(weight, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight, optimizer


def test_observing_the_batch_that_is_trained_on_changes_nothing():
    (plain, optimizer), (observing, other) = trained(20, observing=False), trained(20, observing=True)
    assert plain.equal(observing)
    assert optimizer.scales() == other.scales()


def test_a_bad_gradient_of_the_step_is_kept_from_the_base_though_the_observed_one_was_good():
    weight, optimizer = trained(5, observing=True)
    before = optimizer.scales()
    loss_of(weight, 6).backward()
    optimizer.observe()
    weight.grad = torch.full_like(weight, float("nan"))
    optimizer.step()
    assert weight.isfinite().all()
    assert all(value.isfinite().all() for value in optimizer.state[weight].values())
    assert optimizer.scales() != before  # the observation itself was fine


def test_a_bad_observation_leaves_the_scale_as_it_was_and_the_base_steps_all_the_same():
    weight, optimizer = trained(5, observing=True)
    before, momentum = optimizer.scales(), optimizer.state[weight]["exp_avg"].clone()
    weight.grad = torch.full_like(weight, float("inf"))
    optimizer.observe()
    loss_of(weight, 6).backward()
    gradient = weight.grad.clone()
    optimizer.step()
    assert optimizer.scales() == before
    assert weight.isfinite().all()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], 0.9 * momentum + 0.1 * gradient)


def test_a_group_added_to_the_base_itself_is_observed_too():
    """As one that was there from the start, and observing it makes a difference."""

    def run(*, late, observed):
        weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        groups = [{"params": [weight]} for weight in weights]
        base = torch.optim.SGD(groups[:1] if late else groups, lr=1.0)
        optimizer = Mechanic(base)
        if late:
            base.add_param_group(groups[1])
        for _ in range(5):
            sum((weight - 3).square().sum() for weight in weights[:observed]).backward()
            optimizer.observe()
            sum((weight - 2).square().sum() for weight in weights).backward()
            optimizer.step()
            optimizer.zero_grad()
        return scale(optimizer), [weight.tolist() for weight in weights]

    assert run(late=True, observed=2) == run(late=False, observed=2)
    assert 0 < run(late=True, observed=2)[0] != run(late=True, observed=1)[0]


def test_a_frozen_scale_ignores_observations():
    (weight, optimizer), (twin_weight, twin) = trained(5, observing=True), trained(5, observing=True)
    before = optimizer.scales()
    optimizer.freeze()
    twin.freeze()
    for step in range(5, 8):
        loss_of(weight, 100 + step).backward()
        optimizer.observe()
        assert weight.grad is None
        for w, opt in ((weight, optimizer), (twin_weight, twin)):
            loss_of(w, step).backward()
            opt.step()
            opt.zero_grad()
    assert optimizer.scales() == before
    assert weight.equal(twin_weight)


def test_groups_observe_apart():
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = Mechanic(torch.optim.SGD([{"params": [w]} for w in weights], lr=1.0), per_group=True)
    for _ in range(5):
        (weights[0].square().sum() + weights[1].square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = optimizer.scales()
    weights[0].square().sum().backward()  # nothing is observed of the second
    optimizer.observe()
    (weights[0].square().sum() + weights[1].square().sum()).backward()
    optimizer.step()
    after = optimizer.scales()
    assert after["group 0"] != before["group 0"]
    assert after["group 1"] == before["group 1"]
