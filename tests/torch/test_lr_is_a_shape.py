"""The learning rate passed does not matter; only its course over time does."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import lr_scheduler

from mechanic.torch import Mechanic
from tests.torch.bases import BY_NAME, Base, some_bases
from tests.torch.paths import assert_updated_by, deltas_of
from tests.torch.task import backward, same_bits, scale, train

LRS = (1e-6, 1.0, 1e6)
STEPS = 250


def cosine(optimizer, lr):
    return lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def one_cycle(optimizer, lr):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=STEPS, cycle_momentum=False)


def final_loss(base, schedule, *, lr, peak):
    model = base.model()
    optimizer = base.wrap(model, lr=lr)
    return train(model, optimizer, STEPS, scheduler=schedule(optimizer, peak))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "schedule"),
    [("AdamW", cosine), ("AdamW", one_cycle), ("SGD momentum", cosine), ("Lion", cosine)],
)
def test_every_learning_rate_gives_the_same_loss(name, schedule):
    base = BY_NAME[name]
    if schedule is cosine:
        losses = [final_loss(base, schedule, lr=lr, peak=None) for lr in LRS]
    else:  # which overwrites the learning rate the base was built with
        losses = [final_loss(base, schedule, lr=1.0, peak=lr) for lr in LRS]
    assert losses[1] < 0.2
    assert max(losses) <= 1.01 * min(losses)


@some_bases("AdamW", "SGD momentum", "Lion", "SOAP", "Adafactor")
def test_learning_rates_a_power_of_two_apart_give_the_same_bits(base: Base):
    """Where dividing by the peak is exact, nothing downstream can differ."""
    courses = []
    for lr in (1.0, 2.0**-20, 2.0**10):
        model = base.model()
        optimizer = base.wrap(model, lr=lr)
        train(model, optimizer, 30, scheduler=lr_scheduler.CosineAnnealingLR(optimizer, 30))
        courses.append([torch.tensor(scale(optimizer)), *(p.detach() for p in model.parameters())])
    assert same_bits(courses[0], courses[1])
    assert same_bits(courses[0], courses[2])


@some_bases("AdamW", "SGD momentum", "Lion", "SOAP", "AdamW tensor lr")
def test_at_a_learning_rate_of_zero_nothing_moves(base: Base):
    model = base.model()
    optimizer = base.wrap(model)
    train(model, optimizer, 20)
    before = [torch.tensor(scale(optimizer)), *(p.detach().clone() for p in model.parameters())]
    for group in optimizer.param_groups:
        group["lr"] *= 0
    train(model, optimizer, 5, first=20)
    assert same_bits(before, [torch.tensor(scale(optimizer)), *(p.detach() for p in model.parameters())])


NUMBER, TENSOR = float, torch.tensor


@pytest.mark.parametrize(
    "kinds",
    [(NUMBER, NUMBER), (TENSOR, TENSOR), (NUMBER, TENSOR), (TENSOR, NUMBER)],
    ids=["numbers", "tensors", "number and tensor", "tensor and number"],
)
def test_the_scale_follows_the_largest_learning_rate_among_the_groups_of_its_tuner(kinds):
    """With one group stopped S goes as far as with none stopped."""

    def after_21_steps(last_rates):
        model = BY_NAME["SGD"].model(dtype=torch.float64)
        groups = [
            {"params": layer.parameters(), "lr": kind(1.0)}
            for layer, kind in zip((model[0], model[2]), kinds, strict=True)
        ]
        optimizer = Mechanic(torch.optim.SGD(groups, lr=1.0))
        train(model, optimizer, 20)
        before = scale(optimizer)
        for group, kind, rate in zip(optimizer.param_groups, kinds, last_rates, strict=True):
            group["lr"] = kind(rate)
        train(model, optimizer, 1, first=20)
        return before, scale(optimizer)

    before, after = unstopped = after_21_steps([1.0, 1.0])
    assert after != before
    assert after_21_steps([0.0, 1.0]) == after_21_steps([1.0, 0.0]) == unstopped


def test_ratios_between_groups_of_one_tuner_stay():
    """The first update of SGD is -lr times the gradient, and all there is in Delta."""
    model = BY_NAME["SGD"].model(dtype=torch.float64)
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters(), "lr": 1e-4}]
    optimizer = Mechanic(torch.optim.SGD(groups, lr=7.0))
    assert [group["mechanic_unit"] for group in optimizer.param_groups] == [1e-3, 1e-3]
    train(model, optimizer, 1)
    for group, rate in zip(optimizer.param_groups, (1.0, 0.1), strict=True):
        for p in group["params"]:
            torch.testing.assert_close(optimizer.state[p]["mechanic_delta"], -rate * p.grad, rtol=1e-12, atol=1e-15)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-4]


def test_a_unit_may_be_given_for_a_scheduler_that_hides_its_peak():
    model = BY_NAME["SGD"].model(dtype=torch.float64)
    optimizer = Mechanic(torch.optim.SGD(model.parameters(), lr=1.0), peak_lr=0.05)
    schedule = lr_scheduler.CyclicLR(optimizer, base_lr=0.001, max_lr=0.05, step_size_up=5, cycle_momentum=False)
    rates = []
    for step in range(10):
        optimizer.zero_grad()
        backward(model, step)
        rates.append(optimizer.param_groups[0]["lr"] / 0.05)
        before, updates = deltas_of(model, optimizer), [-rates[-1] * p.grad for p in model.parameters()]
        optimizer.step()
        assert_updated_by(updates, before=before, after=deltas_of(model, optimizer))
        schedule.step()
    assert max(rates) == pytest.approx(1.0)


@pytest.mark.parametrize("attach_first", [True, False])
def test_a_load_before_the_first_step_does_not_hide_the_peak(attach_first):
    """Accelerate loads an optimizer's own state dict into it when it wraps it."""
    model = BY_NAME["AdamW"].model()
    optimizer = BY_NAME["AdamW"].wrap(model)
    if attach_first:
        schedule = one_cycle(optimizer, 1e-3)
    optimizer.load_state_dict(optimizer.state_dict())
    if not attach_first:
        schedule = one_cycle(optimizer, 1e-3)
    train(model, optimizer, 2, scheduler=schedule)
    assert optimizer.param_groups[0]["mechanic_unit"] == 1e-3


def test_an_idle_step_does_not_hide_the_peak():
    """torch.distributed.checkpoint steps at lr = 0 before it loads."""
    model = BY_NAME["AdamW"].model()
    optimizer = BY_NAME["AdamW"].wrap(model)
    get_optimizer_state_dict(model, optimizer)
    train(model, optimizer, 2, scheduler=one_cycle(optimizer, 1e-3))
    assert optimizer.param_groups[0]["mechanic_unit"] == 1e-3


def test_a_unit_that_was_given_survives_a_plain_checkpoint():
    model = BY_NAME["AdamW"].model()
    plain = torch.optim.AdamW(model.parameters(), lr=1.0)
    train(model, plain, 2, scheduler=one_cycle(plain, 1e-3))
    optimizer = Mechanic(torch.optim.AdamW(model.parameters()), peak_lr=0.5)
    with pytest.warns(UserWarning, match="fresh tuner"):
        optimizer.load_state_dict(plain.state_dict())
    train(model, optimizer, 1)
    assert optimizer.param_groups[0]["mechanic_unit"] == 0.5
