"""Gradients that are not finite: nothing breaks, and with skip_nonfinite nothing even shows."""

import random

import pytest
import torch

from mechanic.torch import Mechanic
from mechanic.tuner import TunerState
from tests.torch.bases import Base
from tests.torch.paths import by_default, every_start, every_start_and_int8, on_copies
from tests.torch.task import backward, learned, mlp, same_bits, snapshot, train, train_loss

NONFINITE = 1 + TunerState._fields.index("nonfinite_steps")  # a row of the tuner: the count of such steps
BAD = (float("inf"), float("-inf"), float("nan"), 3e38)


def poison(model, rng, *, everywhere):
    for p in model.parameters() if everywhere else [rng.choice(list(model.parameters()))]:
        flat = p.grad.view(-1)
        flat[rng.randrange(len(flat))] = rng.choice(BAD)


def bad_steps(rng, steps):
    return set(rng.sample(range(steps), 20))


@pytest.mark.long
@every_start_and_int8
def test_tuner_delta_and_parameters_stay_finite(base: Base, wrap):
    rng = random.Random(0)
    model = base.model()
    optimizer = wrap(base.make(model.parameters()))
    start = train_loss(model)
    poisoned = bad_steps(rng, 100)
    for step in range(100):
        optimizer.zero_grad()
        backward(model, step)
        if step in poisoned:
            tuner = optimizer.param_groups[0]["mechanic_tuner"].clone()
            poison(model, rng, everywhere=rng.random() < 0.5)
            optimizer.step()
            tuner[NONFINITE] += 1
            assert optimizer.param_groups[0]["mechanic_tuner"].equal(tuner)
        else:
            optimizer.step()
        assert all(tensor.isfinite().all() for tensor in snapshot(model, optimizer))
    assert train_loss(model) < start / 1.5


@pytest.mark.long
@every_start
def test_20_bad_steps_are_bit_for_bit_those_with_20_zero_gradients(base: Base, wrap):
    is_compared = base.name == "AdamW" and wrap is by_default
    steps = 500 if is_compared else 100

    def run(spoil, first=0):
        rng = random.Random(1)
        model = base.model()
        optimizer = wrap(base.make(model.parameters()))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        poisoned = bad_steps(rng, steps)
        for step in range(steps):
            optimizer.zero_grad()
            backward(model, first + step)
            if step in poisoned:
                spoil(model, rng)
            optimizer.step()
            schedule.step()
        *state, _ = snapshot(model, optimizer)
        return [*state, learned(optimizer)], train_loss(model)

    def zero(model, rng):
        for p in model.parameters():
            p.grad.zero_()

    zeroed, loss = run(zero)
    for everywhere in (False, True):
        assert same_bits(zeroed, run(lambda model, rng, e=everywhere: poison(model, rng, everywhere=e))[0])
    if is_compared:
        # The order of the batches alone changes the loss by a factor of two.
        losses = [run(lambda model, rng: None, first)[1] for first in range(0, 4000, 1000)]
        assert loss < 1.5 * sum(losses) / len(losses)


@pytest.mark.long
@pytest.mark.parametrize(("wrap", "everywhere"), [(by_default, False), (on_copies, True)])
def test_skipping_equals_the_run_without_those_batches_bit_for_bit(wrap, everywhere):
    rng = random.Random(2)
    poisoned = bad_steps(rng, 200)

    def run(with_bad_batches):
        model = mlp()
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1.0), skip_nonfinite=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        for step in range(200):
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
    twin = wrap(torch.optim.AdamW(mlp().parameters(), lr=1.0), skip_nonfinite=True)
    twin.load_state_dict(optimizer.state_dict())
    assert twin.skipped_steps == 20


@pytest.mark.parametrize("tuner", [{}, {"tuner": "its own"}], ids=["shared tuner", "own tuner"])
def test_a_late_group_knows_how_many_steps_were_skipped(tuner):
    """Any group can tell, also when those that were there at the time are gone."""
    model = mlp()
    optimizer = Mechanic(torch.optim.SGD(list(model[0].parameters()), lr=1.0), skip_nonfinite=True)
    backward(model, 0)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    optimizer.add_param_group({"params": list(model[2].parameters()), **tuner})
    assert optimizer.skipped_steps == 1
    del optimizer.param_groups[0]
    assert optimizer.skipped_steps == 1


def test_one_bad_tuner_does_not_hold_up_the_others():
    model = mlp()
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    optimizer = Mechanic(torch.optim.SGD(groups, lr=1.0), per_group=True)
    train(model, optimizer, 5)
    before = [learned(optimizer, group) for group in range(2)]
    optimizer.zero_grad()
    backward(model, 5)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert [learned(optimizer, group).equal(before[group]) for group in range(2)] == [True, False]
    assert [int(group["mechanic_tuner"][NONFINITE, 0]) for group in optimizer.param_groups] == [1, 0]
