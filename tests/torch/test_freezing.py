"""freeze() and release(): what was learned, kept and handed over."""

import copy

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from mechanic.torch import Mechanic
from mechanic.torch.base import is_linear_in_lr
from tests.torch.bases import BY_NAME, Base, every_base
from tests.torch.task import assert_go_on_alike, backward, mlp, scale, train, values_of


def updates(base: Base, lr):
    """What five steps on given gradients propose, each from the same parameters."""
    model = base.model(dtype=torch.float64)
    optimizer = base.make(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(0)
    start = values_of(model)
    proposed = []
    for _ in range(5):
        for p, x in zip(model.parameters(), start, strict=True):
            p.data.copy_(x)
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
        proposed += [p.detach() - x for p, x in zip(model.parameters(), start, strict=True)]
    return proposed


def relative_difference(a, b):
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(a, b, strict=True) if y.any())


@every_base
def test_bases_that_pass_for_linear_in_lr_are(base: Base):
    nonlinearity = relative_difference(updates(base, 0.5), [50 * u for u in updates(base, 0.01)])
    if is_linear_in_lr(base.make(base.model().parameters())):
        assert nonlinearity < 1e-6


@every_base
def test_a_frozen_scale_goes_on_as_the_learned_one_would(base: Base):
    """Against a working copy scaled by S, written out here."""
    model, twin = base.model(dtype=torch.float64), base.model(dtype=torch.float64)
    optimizer, other = (
        Mechanic(base.make(m.parameters()), config={"forgetting": 0.0}) for m in (model, twin)
    )  # so that a difference of Deltas is the base's update
    for m, opt in ((model, optimizer), (twin, other)):
        train(m, opt, 6)
    learned = optimizer.learned_rates()["default"]
    optimizer.freeze()
    assert all("mechanic_delta" not in state for state in optimizer.state.values())
    for step in range(6, 16):
        train(model, optimizer, 1, first=step)
        before = [p.detach().clone() for p in twin.parameters()]
        deltas = [other.state[p]["mechanic_delta"].clone() for p in twin.parameters()]
        train(twin, other, 1, first=step)
        for p, x, delta in zip(twin.parameters(), before, deltas, strict=True):
            u = other.state[p]["mechanic_delta"] - delta
            p.data.copy_(x + learned * u)
    assert scale(optimizer) == pytest.approx(learned, rel=1e-12)
    assert relative_difference(values_of(model), values_of(twin)) < 1e-6


NAMES = [name for name in ("AdamW", "SGD momentum", "Lion", "Muon", "AdamW tensor lr") if name in BY_NAME]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype"), [("AdamW", torch.float32), *((name, torch.float64) for name in NAMES)], ids=str
)
def test_released_the_plain_base_continues_with_its_schedule(name, dtype):
    base = BY_NAME[name]
    models = base.model(dtype=dtype), base.model(dtype=dtype)
    optimizers = [base.wrap(model, lr=0.5) for model in models]
    schedules = [CosineAnnealingLR(optimizer, 300) for optimizer in optimizers]
    for model, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
        train(model, optimizer, 100, scheduler=schedule)
        optimizer.freeze()
    rate = float(optimizers[0].param_groups[0]["lr"]) / 0.5 * scale(optimizers[0])
    plain = optimizers[0].release()
    assert type(plain) is base.cls
    assert float(plain.param_groups[0]["lr"]) == pytest.approx(rate)
    assert not [key for key in plain.param_groups[0] if key.startswith("mechanic_")]
    # A new scheduler makes its first step by itself, hence - 1.
    continued = CosineAnnealingLR(plain, 300, last_epoch=schedules[0].last_epoch - 1)
    steps = 200 if dtype == torch.float64 else 10  # before rounding grows with the training
    train(models[0], plain, steps, first=100, scheduler=continued)
    train(models[1], optimizers[1], steps, first=100, scheduler=schedules[1])
    assert relative_difference(values_of(models[0]), values_of(models[1])) <= 1e-6


def test_released_in_the_midst_of_a_one_cycle_it_goes_on_to_the_end_of_it():
    """OneCycleLR keeps its peak and its end in the param groups, and ends at the latter."""
    models = [mlp(dtype=torch.float64) for _ in range(2)]
    optimizers = [Mechanic(torch.optim.AdamW(model.parameters(), lr=0.5)) for model in models]
    cycle = {"max_lr": 0.5, "total_steps": 60, "cycle_momentum": False, "final_div_factor": 2.0}
    schedules = [OneCycleLR(optimizer, **cycle) for optimizer in optimizers]
    for model, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
        train(model, optimizer, 30, scheduler=schedule)
        optimizer.freeze()
    learned = scale(optimizers[0])
    plain = optimizers[0].release()
    continued = OneCycleLR(plain, **cycle, last_epoch=schedules[0].last_epoch - 1)
    train(models[0], plain, 29, first=30, scheduler=continued)
    train(models[1], optimizers[1], 29, first=30, scheduler=schedules[1])
    assert optimizers[1].param_groups[0]["lr"] == pytest.approx(0.5 / 25 / 2)
    assert plain.param_groups[0]["lr"] == pytest.approx(learned * 1 / 25 / 2)
    assert relative_difference(values_of(models[0]), values_of(models[1])) <= 1e-9


def test_released_half_precision_parameters_go_on_with_a_plain_base():
    model = mlp(dtype=torch.bfloat16)
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
    train(model, optimizer, 20)
    plain = optimizer.release()
    assert plain.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16
    train(model, plain, 3, first=20)


@pytest.mark.parametrize("name", ["Adafactor", "Rprop", "ASGD"])
def test_release_of_a_base_that_is_not_linear_in_lr_is_refused(name):
    model = BY_NAME[name].model()
    optimizer = BY_NAME[name].wrap(model)
    train(model, optimizer, 3)
    with pytest.raises(TypeError, match=rf"update of {name} is not known to be proportional to lr.*freeze\(\)"):
        optimizer.release()
    train(model, optimizer, 1)


def test_nothing_learned_cannot_be_frozen():
    optimizer = Mechanic(torch.optim.AdamW(mlp().parameters(), lr=1.0))
    with pytest.raises(ValueError, match=r"nothing has been learned yet, the scales are \{'default': 0\.0\}"):
        optimizer.freeze()


def test_an_observation_is_dropped():
    model = mlp()
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
    train(model, optimizer, 5)
    backward(model, 5)
    optimizer.observe()
    optimizer.freeze()
    optimizer.step_in_backward()
    train(model, optimizer, 2, first=6)


def test_a_frozen_checkpoint_loads_frozen_and_an_unfrozen_one_thaws():
    model, twin = mlp(), mlp(seed=1)
    optimizer, other = (Mechanic(torch.optim.AdamW(m.parameters(), lr=1.0)) for m in (model, twin))
    train(model, optimizer, 5)
    running = copy.deepcopy(optimizer.state_dict())
    optimizer.freeze()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.load_state_dict(model.state_dict())
    assert other.is_frozen
    assert_go_on_alike((model, optimizer), (twin, other), steps=3, first=5)
    other.load_state_dict(running)
    assert not other.is_frozen
