"""A run that is resumed by a script with another learning rate goes on as if that were the same."""

import copy
import itertools

import pytest
import torch
from torch.optim import AdamW, lr_scheduler

from mechanic.torch import Mechanic
from tests.torch.task import backward, mlp, scale, train

STEPS = 40
SCHEDULERS = {
    "LambdaLR": lambda opt, lr: lr_scheduler.LambdaLR(opt, lambda t: 1 - t / 200),
    "warm-up": lambda opt, lr: lr_scheduler.LambdaLR(opt, lambda t: min(1.0, (t + 1) / 20)),
    "LinearLR": lambda opt, lr: lr_scheduler.LinearLR(opt, 1.0, 0.1, 100),
    "CosineAnnealingLR": lambda opt, lr: lr_scheduler.CosineAnnealingLR(opt, 100),
    "StepLR": lambda opt, lr: lr_scheduler.StepLR(opt, 15),
    "OneCycleLR": lambda opt, lr: lr_scheduler.OneCycleLR(opt, max_lr=lr, total_steps=200),
    "none": None,
}


@pytest.fixture(scope="module", params=[1.0, 3e-4], ids=["saved at 1", "saved at 3e-4"])
def saved(request):
    return {name: _saved(make, request.param) for name, make in SCHEDULERS.items()}


def _saved(make, lr):
    model = mlp(dtype=torch.float64)
    optimizer = Mechanic(AdamW(model.parameters(), lr=lr))
    scheduler = make(optimizer, lr) if make else None
    train(model, optimizer, STEPS, scheduler=scheduler)
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler and scheduler.state_dict()))


def _course(saved, make, lr, order, *, restored):
    """Parameters after a resume, step by step, and the effective rates."""
    weights, of_optimizer, of_scheduler = copy.deepcopy(saved)
    model = mlp(dtype=torch.float64)
    model.load_state_dict(weights)
    optimizer = Mechanic(AdamW(model.parameters(), lr=lr))
    scheduler = make(optimizer, lr) if make and order == "before" else None
    optimizer.load_state_dict(of_optimizer)
    if make and order == "after":
        scheduler = make(optimizer, lr)
    if restored and scheduler is not None:
        scheduler.load_state_dict(of_scheduler)
    rates = []
    for step in range(STEPS, STEPS + 12):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        rates.append(optimizer.learning_rates()["default"] / scale(optimizer))
        if scheduler is not None:
            scheduler.step()
    return rates


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_course_of_the_rate_is_that_of_a_script_with_the_same_lr(saved, name):
    make = SCHEDULERS[name]
    same = saved[name][1]["param_groups"][0]["mechanic_unit"]
    for case in itertools.product(("before", "after"), (True, False)):
        order, restored = case
        expected = pytest.approx(_course(saved[name], make, same, order, restored=restored), rel=1e-6)
        for lr in (1.0, 3e-4):
            assert _course(saved[name], make, lr, order, restored=restored) == expected, (lr, case)


def test_a_rate_above_the_peak_whose_unit_is_not_known_is_told():
    model = mlp()
    optimizer = Mechanic(AdamW(model.parameters(), lr=3e-4))
    train(model, optimizer, 10)
    resumed = Mechanic(AdamW(model.parameters(), lr=1.0))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.param_groups[0]["lr"] = 4e-4
    with pytest.warns(UserWarning, match=r"build the base optimizer with lr=0\.0003"):
        train(model, resumed, 1)


def test_a_rate_of_0_tells_nothing_of_its_unit_and_the_next_one_does():
    model = mlp(dtype=torch.float64)
    former = Mechanic(AdamW(model.parameters(), lr=1.0))
    train(model, former, 60)
    saved = copy.deepcopy((model.state_dict(), former.state_dict()))
    learned = []
    for peak in (1.0, 3e-4):
        optimizer = Mechanic(AdamW(model.parameters(), lr=peak))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        for share in (0.0, 0.5):
            optimizer.param_groups[0]["lr"] = share * peak
            train(model, optimizer, 1)
            assert optimizer.learning_rates()["default"] == pytest.approx(share * scale(optimizer))
        learned.append(optimizer.learned_rates()["default"])
    assert learned[1] == pytest.approx(learned[0], rel=1e-9)  # the rates of both units have their weight in it


def test_the_checkpoint_of_a_bare_base_brings_no_unit_to_compare_with():
    """The tuner is fresh then, and finds its S in the units that there are."""
    model = mlp()
    bare = AdamW(model.parameters(), lr=1.0)
    train(model, bare, 3)
    optimizer = Mechanic(AdamW(model.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match="fresh tuner"):
        optimizer.load_state_dict(copy.deepcopy(bare.state_dict()))
    train(model, optimizer, 3)
    tuner = optimizer.param_groups[0]["mechanic_tuner"].clone()
    optimizer.param_groups[0]["lr"] = 2.0  # without a word
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.param_groups[0]["mechanic_tuner"].equal(tuner)
