"""What the base is lent: Delta itself where it is known not to look at values, else copies. The course is the same."""

import importlib

import pytest
import torch
from torch.optim import SGD, AdamW

from mechanic.torch import Mechanic
from mechanic.torch.bases import decoupled_decays
from tests.torch.bases import BY_NAME, Base, every_base
from tests.torch.memory import cost
from tests.torch.paths import (
    ON_DELTA,
    by_default,
    every_path,
    instead_of_its_step,
    on_copies,
    steps_on_delta,
)
from tests.torch.task import backward, mlp, same_bits, scale, train


def decays(base):
    for group in base.param_groups:
        group["mechanic_unit"] = 1.0
    return decoupled_decays(base)


def updates(base: Base, start):
    """What five steps on given gradients propose, each from the same values."""
    model = base.model(dtype=torch.float64)
    optimizer = base.make(model.parameters())
    generator = torch.Generator().manual_seed(0)
    proposed = []
    for _ in range(5):
        for p in model.parameters():
            p.data.fill_(start)
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
        proposed += [p.detach() - start for p in model.parameters()]
    return proposed, decays(optimizer)


@every_base
def test_bases_that_pass_for_blind_are(base: Base):
    (from_zero, share), (from_two, _) = (updates(base, start) for start in (0.0, 2.0))
    differences = [b - a for a, b in zip(from_zero, from_two, strict=True)]
    if share is not None:
        for difference in differences:
            torch.testing.assert_close(difference, torch.full_like(difference, -2.0 * share[0]), rtol=0, atol=1e-12)
    elif base.cls.__name__ in ("Adafactor", "Lamb", "ASGD"):
        assert any(difference.any() for difference in differences)


@every_path
def test_the_base_steps_on_what_the_path_says(base: Base, wrap):
    """So a test that claims something for a path does run it, and the probe in paths.py does not change it."""
    model = base.model()
    optimizer = wrap(base.make(model.parameters()))
    train(model, optimizer, 2)
    places = {
        "Delta": [optimizer.state[p]["mechanic_delta"].data_ptr() for p in model.parameters()],
        "parameters": [p.data_ptr() for p in model.parameters()],
    }
    seen = []

    def look(step):
        lent = [p.data_ptr() for p in model.parameters()]
        seen.append(next((name for name, place in places.items() if place == lent), "copies"))
        step()

    with instead_of_its_step(optimizer.base, look):
        train(model, optimizer, 2, first=2)
    assert seen == ["Delta" if steps_on_delta(base, wrap) else "copies"] * 2


@pytest.mark.parametrize("name", sorted(ON_DELTA))
def test_on_delta_the_course_is_that_on_copies(name):
    base = BY_NAME[name]
    models = base.model(dtype=torch.float64), base.model(dtype=torch.float64)
    assert decays(base.make(models[0].parameters())) is not None
    optimizers = [wrap(base.make(m.parameters())) for m, wrap in zip(models, (by_default, on_copies), strict=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 60)
    assert scale(optimizers[0]) == pytest.approx(scale(optimizers[1]), rel=1e-6)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)


def test_groups_with_and_without_weight_decay_go_together():
    models = [mlp(dtype=torch.float64) for _ in range(2)]
    for model, wrap in zip(models, (by_default, on_copies), strict=True):
        groups = [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.2, "lr": 0.5},
            {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
        ]
        optimizer = wrap(AdamW(groups, lr=1.0))
        train(model, optimizer, 40)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=1.0, weight_decay=0.1),  # into the gradient
        lambda p: AdamW(p, lr=torch.tensor(1.0)),  # may be 0, and looking would wait
        lambda p: type("Custom", (SGD,), {})(p, lr=1.0),
        lambda p: on_copies(SGD(p, lr=1.0)).base,
    ],
    ids=["L2", "tensor lr", "subclass", "hook"],
)
def test_who_may_look_is_lent_copies(make):
    assert decays(make(mlp().parameters())) is None


def test_the_base_never_sees_delta_under_a_hook():
    model = mlp()
    optimizer = Mechanic(SGD(model.parameters(), lr=1.0))
    train(model, optimizer, 5)
    before = [p.detach().clone() for p in model.parameters()]
    seen = []
    optimizer.base.register_step_pre_hook(lambda *_: seen.extend(p.detach().clone() for p in model.parameters()))
    backward(model, 5)
    optimizer.step()
    assert same_bits(seen, before)


@pytest.mark.parametrize("name", ["AdamW fused", "SGD fused"])
def test_on_delta_nothing_comes_and_goes(name):
    base = BY_NAME[name]
    kept, passing = cost(Mechanic, base)
    bare_kept, bare_passing = cost(lambda bare: bare, base)
    assert kept - bare_kept == pytest.approx(1, abs=0.01)
    assert passing <= bare_passing + 0.01


@pytest.mark.parametrize("config", [None, {"forgetting": 0.0}], ids=["default", "nothing forgotten"])
def test_a_base_that_fails_on_delta_leaves_parameters_at_the_start_and_s_delta(monkeypatch, config):
    """It may have moved Delta, as a bare base that fails may have moved parameters; x_1 + S Delta still holds."""
    model = mlp(dtype=torch.float64)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = Mechanic(SGD(model.parameters(), lr=1.0, momentum=0.9), config=config)
    train(model, optimizer, 5)
    tuner = optimizer.param_groups[0]["mechanic_tuner"].clone()
    module = importlib.import_module("torch.optim.sgd")
    update = module.sgd

    def fail(*args, **kwargs):
        update(*args, **kwargs)
        raise MemoryError

    monkeypatch.setattr(module, "sgd", fail)
    backward(model, 5)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert optimizer.param_groups[0]["mechanic_tuner"].equal(tuner)
    for p, x in zip(model.parameters(), start, strict=True):
        expected = x + scale(optimizer) * optimizer.state[p]["mechanic_delta"]
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("changed", [{"lr": 0.0}, {"lr": torch.tensor(1.0)}, {"weight_decay": torch.tensor(0.1)}])
def test_a_base_steps_on_copies_where_lr_is_0_or_a_number_is_a_tensor(changed):
    optimizer = Mechanic(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=1.0))
    assert decoupled_decays(optimizer.base) == [0.01]
    optimizer.param_groups[0].update(changed)
    assert decoupled_decays(optimizer.base) is None
