"""Gradients that are not finite: nothing breaks, and with skip_nonfinite nothing even shows."""

import random

import pytest
import torch

from bases import Base, every_base
from mechanic.torch import Mechanic
from task import backward, mlp, same_bits, snapshot, train, train_loss

BAD = (float("inf"), float("-inf"), float("nan"), 3e38)


def poison(model, rng, *, everywhere):
    for p in model.parameters() if everywhere else [rng.choice(list(model.parameters()))]:
        flat = p.grad.view(-1)
        flat[rng.randrange(len(flat))] = rng.choice(BAD)


def bad_steps(rng, steps):
    return set(rng.sample(range(steps), 20))


@pytest.mark.parametrize("everywhere", [False, True])
@every_base
def test_tuner_delta_and_parameters_stay_finite(base: Base, everywhere):
    rng = random.Random(0)
    model = base.model()
    optimizer = base.wrap(model)
    start = train_loss(model)
    poisoned = bad_steps(rng, 100)
    for step in range(100):
        optimizer.zero_grad()
        backward(model, step)
        if step in poisoned:
            tuner = optimizer.param_groups[0]["mechanic_tuner"].clone()
            poison(model, rng, everywhere=everywhere)
            optimizer.step()
            tuner[-1] += 1  # the count of such steps
            assert optimizer.param_groups[0]["mechanic_tuner"].equal(tuner)
        else:
            optimizer.step()
        assert all(tensor.isfinite().all() for tensor in snapshot(model, optimizer))
    assert train_loss(model) < start / 1.5


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_500_steps_with_20_bad_ones(name, everywhere):
    from bases import BY_NAME

    rng = random.Random(1)
    base = BY_NAME[name]
    model = base.model()
    optimizer = base.wrap(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    poisoned = bad_steps(rng, 500)
    for step in range(500):
        optimizer.zero_grad()
        backward(model, step)
        if step in poisoned:
            poison(model, rng, everywhere=everywhere)
        optimizer.step()
        schedule.step()
        assert all(tensor.isfinite().all() for tensor in snapshot(model, optimizer))
    clean = base.model()
    good = base.wrap(clean)
    without = train(clean, good, 500, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(good, 500))
    assert train_loss(model) < 2 * without + 0.02


@pytest.mark.parametrize("everywhere", [False, True])
def test_skipping_equals_the_run_without_those_batches_bit_for_bit(everywhere):
    rng = random.Random(2)
    poisoned = bad_steps(rng, 500)

    def run(with_bad_batches):
        model = mlp()
        optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0), skip_nonfinite=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
        for step in range(500):
            if step in poisoned and not with_bad_batches:
                continue
            optimizer.zero_grad()
            backward(model, step)
            if step in poisoned:
                poison(model, rng, everywhere=everywhere)
            skipped = optimizer.skipped_steps
            optimizer.step()
            if optimizer.skipped_steps == skipped:
                schedule.step()
        return snapshot(model, optimizer), optimizer

    with_bad, optimizer = run(with_bad_batches=True)
    without, clean = run(with_bad_batches=False)
    assert optimizer.skipped_steps == 20
    assert clean.skipped_steps == 0
    assert same_bits(with_bad, without)
    twin = Mechanic(torch.optim.AdamW(mlp().parameters(), lr=1.0), skip_nonfinite=True)
    twin.load_state_dict(optimizer.state_dict())
    assert twin.skipped_steps == 20


def test_one_bad_tuner_does_not_hold_up_the_others():
    model = mlp()
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    optimizer = Mechanic(torch.optim.SGD(groups, lr=1.0), per_group=True)
    train(model, optimizer, 5)
    before = [group["mechanic_tuner"].clone() for group in optimizer.param_groups]
    optimizer.zero_grad()
    backward(model, 5)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    after = [group["mechanic_tuner"] for group in optimizer.param_groups]
    changed = [not new[:-1].equal(old[:-1]) for new, old in zip(after, before, strict=True)]
    assert changed == [False, True]
    assert [int(tuner[-1, 0]) for tuner in after] == [1, 0]
