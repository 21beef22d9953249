"""One tuner per named group: the same code with more rows."""

import numpy as np
import pytest
import torch

from mechanic.torch import Mechanic, layer_groups
from tests.shared import oracle
from tests.torch.task import backward, mlp, same_bits, scale, snapshot, train


def two_groups(model, **names):
    return [
        {"params": list(model[0].parameters()), **({"tuner": names["first"]} if "first" in names else {})},
        {"params": list(model[2].parameters()), **({"tuner": names["second"]} if "second" in names else {})},
    ]


@pytest.mark.parametrize("options", [{"per_group": True}, {"per_group": False}])
def test_one_group_gives_the_same_bits_named_apart_or_not(options):
    models = mlp(), mlp()
    plain = Mechanic(torch.optim.AdamW(models[0].parameters(), lr=1.0))
    named = Mechanic(torch.optim.AdamW([{"params": models[1].parameters(), "tuner": "all"}], lr=1.0), **options)
    for model, optimizer in zip(models, (plain, named), strict=True):
        train(model, optimizer, 10)
    assert same_bits(snapshot(models[0], plain), snapshot(models[1], named))


def test_groups_that_name_the_same_tuner_give_the_same_bits_as_one_group():
    """Up to the order in which sums are added."""
    models = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    one = Mechanic(torch.optim.AdamW(models[0].parameters(), lr=1.0))
    two = Mechanic(torch.optim.AdamW(two_groups(models[1], first="net", second="net"), lr=1.0))
    for model, optimizer in zip(models, (one, two), strict=True):
        train(model, optimizer, 10)
    assert two.scales() == {"net": pytest.approx(scale(one), rel=1e-12)}
    assert two.param_groups[0]["mechanic_tuner"].equal(two.param_groups[1]["mechanic_tuner"])


def test_which_tuner_a_group_has():
    model = mlp()

    def names(groups, **options):
        return list(Mechanic(torch.optim.SGD(groups, lr=1.0), **options).scales())

    assert names(two_groups(model)) == ["default"]
    assert names(two_groups(model), per_group=True) == ["group 0", "group 1"]
    assert names(two_groups(model, second="head")) == ["default", "head"]
    assert names(two_groups(model, second="head"), per_group=True) == ["group 0", "head"]
    assert names(two_groups(model, first="a", second="b")) == ["a", "b"]


@pytest.mark.long
def test_each_tuner_follows_the_oracle_on_its_group_alone():
    """Two quadratics that know nothing of each other, a million apart in scale."""
    rng = np.random.default_rng(0)
    starts = [rng.normal(size=5), 1e3 * rng.normal(size=7)]
    curvatures = [np.logspace(-1, 0, 5), np.logspace(-4, -3, 7)]
    params = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    optimizer = Mechanic(torch.optim.SGD([{"params": [p]} for p in params], lr=1.0, momentum=0.9), per_group=True)
    oracles = [oracle.Oracle(oracle.SGD(lambda t: 1.0, momentum=0.9), start) for start in starts]
    for _ in range(100):
        for p, curvature, reference in zip(params, curvatures, oracles, strict=True):
            p.grad = torch.tensor(curvature) * p.detach()
            reference.step(curvature * reference.x)
        optimizer.step()
        for p, reference, learned in zip(params, oracles, optimizer.scales().values(), strict=True):
            assert learned == pytest.approx(reference.scale, rel=1e-9)
            np.testing.assert_allclose(p.detach().numpy(), reference.x, rtol=1e-9, atol=1e-9)


def test_lr_ratios_stay_within_a_tuner_and_are_dropped_between_tuners():
    model = mlp()
    groups = two_groups(model, first="a", second="b")
    groups[0]["lr"] = 1e-3
    optimizer = Mechanic(torch.optim.SGD(groups, lr=5.0))
    assert [group["mechanic_unit"] for group in optimizer.param_groups] == [1e-3, 5.0]


class TestLayerGroups:
    def test_a_weight_and_its_bias_share_a_tuner(self):
        model = mlp()
        groups = layer_groups(model)
        assert [group["tuner"] for group in groups] == ["0", "2"]
        assert [len(group["params"]) for group in groups] == [2, 2]
        assert layer_groups(model, [{"params": model.named_parameters()}]) == groups

    def test_a_group_may_be_one_tensor(self):
        model = mlp()
        groups = layer_groups(model, [{"params": model[0].weight, "weight_decay": 0.1}])
        assert groups == [{"params": [model[0].weight], "weight_decay": 0.1, "tuner": "0"}]

    def test_the_users_options_are_kept_and_one_layer_is_one_tuner(self):
        model = mlp()
        weights = [p for p in model.parameters() if p.ndim == 2]
        biases = [p for p in model.parameters() if p.ndim == 1]
        own = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        optimizer = Mechanic(torch.optim.AdamW(layer_groups(model, own), lr=1.0))
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0, 0.0]
        assert [group["mechanic_row"] for group in optimizer.param_groups] == [0, 1, 0, 1]
        assert train(model, optimizer, 60) < 1.0

    def test_a_group_with_a_tuner_of_its_own_is_kept(self):
        model = mlp()
        extra = {"params": [torch.nn.Parameter(torch.ones(2))], "tuner": "extra"}
        assert layer_groups(model, [{"params": model.parameters()}, extra])[-1] is extra

    def test_strangers_are_named(self):
        with pytest.raises(ValueError, match="not the module's; give them a 'tuner'"):
            layer_groups(mlp(), [{"params": [torch.nn.Parameter(torch.ones(2))]}])


def test_d_times_lr_is_the_rate_really_applied():
    """What trainers log. SGD's step is -rate * gradient, so the rate can be read off the parameters."""
    p = torch.nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
    optimizer = Mechanic(torch.optim.SGD([p], lr=0.25))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for _ in range(10):
        p.grad = p.detach().clone()
        optimizer.step()
        made = optimizer.param_groups[0]["lr"]
        schedule.step()
    group = optimizer.param_groups[0]
    d = group["d"]
    assert d.shape == ()
    assert optimizer.learning_rates() == {"default": pytest.approx(float(d) * made)}
    assert optimizer.scales() == {"default": pytest.approx(float(d) * 0.25)}
    optimizer.freeze()
    assert optimizer.scales() == pytest.approx(optimizer.learned_rates())
    assert optimizer.scales() == {"default": pytest.approx(float(group["d"]) * 0.25)}
    rate = float(group["d"] * group["lr"])  # of the next step
    before, gradient = p.detach().clone(), torch.tensor([1.0, 2.0], dtype=torch.float64)
    p.grad = gradient.clone()
    optimizer.step()
    torch.testing.assert_close((before - p.detach()) / gradient, torch.full((2,), rate, dtype=torch.float64))


def test_adafactors_own_d_is_left_alone():
    model = mlp()
    optimizer = Mechanic(torch.optim.Adafactor(model.parameters(), lr=1.0, d=2.0))
    train(model, optimizer, 3)
    assert optimizer.param_groups[0]["d"] == 2.0
    assert optimizer.scales()["default"] > 0


def test_learning_rates_follow_the_schedule():
    model = mlp()
    optimizer = Mechanic(torch.optim.AdamW(two_groups(model), lr=1e-3), per_group=True)
    optimizer.param_groups[1]["lr"] = 5e-4  # as a scheduler would
    optimizer.zero_grad()
    for step in range(3):
        backward(model, step)
        optimizer.step()
    scales, rates = optimizer.scales(), optimizer.learning_rates()
    assert rates == {"group 0": pytest.approx(scales["group 0"]), "group 1": pytest.approx(scales["group 1"] / 2)}


def test_a_shown_scale_on_another_device_is_made_anew():
    model = mlp()
    optimizer = Mechanic(torch.optim.SGD(model.parameters(), lr=1.0))
    train(model, optimizer, 3)
    optimizer.param_groups[0]["d"] = torch.zeros((), device="meta")  # as if the model had been moved
    train(model, optimizer, 1, first=3)
    assert optimizer.param_groups[0]["d"].item() == pytest.approx(scale(optimizer))
