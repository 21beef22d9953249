"""Several optimizers as one base."""

import copy

import pytest
import pytorch_optimizer
import schedulefree
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from mechanic.torch import Mechanic, Together
from tests.torch.task import backward, mlp, same_bits, snapshot, train, train_loss, values_of

needs_muon = pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch has Muon from 2.9 on")


def split(model):
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]


def sgd_adamw(model, lr=1.0, **options):
    weights, biases = split(model)
    return Together(
        optim.SGD([{"params": weights, **options}], lr=lr, momentum=0.9), optim.AdamW(biases, lr=lr, weight_decay=0.1)
    )


def muon_adamw(model, lr=1.0, **options):
    weights, biases = split(model)
    muon = optim.Muon([{"params": weights, **options}], lr=lr, adjust_lr_fn="match_rms_adamw")
    return Together(muon, optim.AdamW(biases, lr=lr, weight_decay=0.1))


def lion_adafactor(model, lr=1.0, **options):
    weights, biases = split(model)
    lion = pytorch_optimizer.Lion([{"params": weights, **options}], lr=lr)
    return Together(lion, optim.Adafactor(biases, lr=lr))


pairs = pytest.mark.parametrize(
    "pair", [sgd_adamw, pytest.param(muon_adamw, marks=needs_muon), lion_adafactor], ids=lambda pair: pair.__name__
)


# The pair itself, without Mechanic.


@pairs
def test_it_steps_as_its_optimizers_do(pair):
    models = mlp(), mlp()
    together, apart = (pair(model, lr=0.01) for model in models)
    first, second = apart.members
    for step in range(5):
        for model in models:
            model.zero_grad()
            backward(model, step)
        together.step()
        first.step()
        second.step()
    assert same_bits(values_of(models[0]), values_of(models[1]))


def test_groups_keep_the_options_of_their_optimizer():
    together = sgd_adamw(mlp())
    of_sgd, of_adamw = together.param_groups
    assert (of_sgd["optimizer"], of_adamw["optimizer"]) == ("SGD", "AdamW")
    assert "betas" not in of_sgd
    assert "momentum" not in of_adamw
    assert {"lr", "weight_decay"} <= set(together.defaults)
    assert not {"betas", "momentum"} & set(together.defaults)


def test_two_of_one_class_have_two_names():
    weights, biases = split(mlp())
    together = Together(optim.AdamW(weights, betas=(0.8, 0.9)), optim.AdamW(biases))
    assert [group["optimizer"] for group in together.param_groups] == ["AdamW", "AdamW 2"]
    assert [group["betas"][0] for group in together.param_groups] == [0.8, 0.9]


def test_a_closure_is_called_once():
    model, calls = mlp(), []
    together = sgd_adamw(model, lr=0.01)

    def closure():
        calls.append(1)
        together.zero_grad()
        return backward(model, 0)

    assert together.step(closure) > 0
    assert len(calls) == 1


def test_hooks_on_all_optimizers_are_called_once_per_step():
    model, calls = mlp(), []
    together = sgd_adamw(model, lr=0.01)
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        train(model, together, 3)
    finally:
        handle.remove()
    assert len(calls) == 3


def test_every_member_has_a_state_dict_of_its_own_parts():
    model = mlp()
    together = sgd_adamw(model, lr=0.01)
    train(model, together, 2)
    sgd, adamw = together.members
    assert [set(entry) for entry in sgd.state_dict()["state"].values()] == [{"momentum_buffer"}] * 2
    assert [set(entry) for entry in adamw.state_dict()["state"].values()] == [{"step", "exp_avg", "exp_avg_sq"}] * 2


def test_a_pair_that_makes_no_sense_is_refused():
    weights, biases = split(mlp())
    with pytest.raises(ValueError, match="in several of the optimizers"):
        Together(optim.SGD(weights), optim.AdamW([*biases, weights[0]]))
    with pytest.raises(TypeError, match="one by one, got list"):
        Together([optim.SGD(weights)])
    with pytest.raises(ValueError, match="at least one"):
        Together()
    with pytest.raises(TypeError, match="in one"):
        Together(Together(optim.SGD(weights)), optim.AdamW(biases))
    with pytest.raises(TypeError, match=r"Mechanic\(Together"):
        Together(Mechanic(optim.SGD(weights)), optim.AdamW(biases))


def test_an_optimizer_with_state_of_no_parameter_is_refused():
    class Odd(optim.SGD):
        def step(self, closure=None):
            self.state["count"] = 1

    weights, biases = split(mlp())
    together = Together(Odd(weights, lr=0.1), optim.AdamW(biases))
    with pytest.raises(TypeError, match="'count'"):
        together.step()


# Inside of Mechanic.


@pytest.mark.long
@pairs
def test_it_trains_with_one_tuner_and_with_two(pair):
    for options in ({}, {"per_group": True}):
        model = mlp()
        base, start = pair(model), train_loss(model)
        optimizer = Mechanic(base, **options)
        assert train(model, optimizer, 60) < start / 2
        kept = [{id(p) for p in each.state} for each in (*base.members, base)]  # not of the copies that they step on
        expected = [[p for group in each.param_groups for p in group["params"]] for each in (*base.members, base)]
        assert kept == [set(map(id, params)) for params in expected]
        assert len(optimizer.scales()) == 1 + len(options)
        assert all(scale > 0 for scale in optimizer.scales().values())


def test_a_group_may_name_its_tuner():
    optimizer = Mechanic(sgd_adamw(mlp(), tuner="weights"))
    assert list(optimizer.scales()) == ["weights", "default"]


def test_around_one_optimizer_it_changes_nothing():
    models = mlp(), mlp()
    bases = [optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1) for model in models]
    bare, alone = Mechanic(bases[0]), Mechanic(Together(bases[1]))
    for model, optimizer in zip(models, (bare, alone), strict=True):
        train(model, optimizer, 10)
    assert same_bits(snapshot(models[0], bare), snapshot(models[1], alone))


def test_the_checkpoint_of_another_pair_is_refused_and_nothing_changes():
    model = mlp()
    optimizer = Mechanic(sgd_adamw(model))
    train(model, optimizer, 3)
    weights, biases = split(other := mlp())
    swapped = Mechanic(Together(optim.AdamW(weights, lr=1.0), optim.SGD(biases, lr=1.0, momentum=0.9)))
    train(other, swapped, 3)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"'mechanic_base'.*checkpoint has AdamW, this optimizer has SGD"):
        optimizer.load_state_dict(swapped.state_dict())
    broken = copy.deepcopy(optimizer.state_dict())
    del broken["param_groups"][1]["betas"]  # of the second optimizer
    with pytest.raises(ValueError, match="betas"):
        optimizer.load_state_dict(broken)
    assert same_bits(before, snapshot(model, optimizer))
    train(model, optimizer, 1, first=3)


def test_new_parameters_go_to_the_optimizer_that_their_group_names():
    model, extra = mlp(), nn.Parameter(torch.ones(3))
    optimizer = Mechanic(sgd_adamw(model))
    train(model, optimizer, 3)
    for group in ({"params": [extra]}, {"params": [extra], "optimizer": "Adam"}):
        with pytest.raises(ValueError, match=r"one of \['SGD', 'AdamW'\]"):
            optimizer.add_param_group(group)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight], "optimizer": "AdamW"})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [extra], "optimizer": "AdamW", "weight_decay": 0.0})
    assert optimizer.param_groups[2]["betas"] == (0.9, 0.999)
    optimizer.zero_grad()
    backward(model, 3)
    extra.grad = torch.ones(3)
    optimizer.step()
    assert "exp_avg" in optimizer.state[extra]
    assert (extra < 1).all()
    optimizer.param_groups.append({**optimizer.param_groups[2], "params": [], "optimizer": None})
    with pytest.raises(ValueError, match="add_param_group"):
        optimizer.step()


def test_released_the_optimizers_go_on_with_what_was_learned():
    models = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    optimizers = [Mechanic(sgd_adamw(model, lr=0.5), per_group=True) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 20)
    frozen, released = optimizers[0], optimizers[1].release()
    frozen.freeze()
    scales = list(frozen.scales().values())
    first, second = released.members
    assert [member.param_groups[0]["lr"] for member in (first, second)] == pytest.approx(scales)
    assert not [key for group in released.param_groups for key in group if key.startswith("mechanic")]
    for step in range(20, 25):
        train(models[0], frozen, 1, first=step)
        models[1].zero_grad()
        backward(models[1], step)
        first.step()
        second.step()
    for a, b in zip(values_of(models[0]), values_of(models[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_what_is_not_proportional_to_lr_can_be_frozen_but_not_released():
    model = mlp()
    optimizer = Mechanic(lion_adafactor(model))
    train(model, optimizer, 10)
    with pytest.raises(TypeError, match="not known to be proportional"):
        optimizer.release()
    optimizer.freeze()
    loss = train_loss(model)
    assert train(model, optimizer, 10, first=10) < loss


def test_an_unsuitable_member_is_refused():
    weights, biases = split(mlp())
    with pytest.raises(TypeError, match="LBFGS"):
        Mechanic(Together(optim.LBFGS(weights), optim.AdamW(biases)))
    first, second = optim.SGD(weights), optim.AdamW(biases)
    first.maximize = True
    with pytest.raises(ValueError, match="alike"):
        Mechanic(Together(first, second))
    with pytest.raises(TypeError, match=r"Mechanic\(Together"):
        Mechanic([first, second])


def test_if_the_second_fails_the_first_has_not_moved_anything():
    class Failing(optim.AdamW):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("out of memory")
            return super().step(closure)

    model = mlp()
    weights, biases = split(model)
    second = Failing(biases, lr=1.0)
    optimizer = Mechanic(Together(optim.SGD(weights, lr=1.0, momentum=0.9), second))
    for first in (0, 4):
        before = values_of(model)
        second.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            train(model, optimizer, 1, first=first)
        assert same_bits(before, values_of(model))
        second.fails = False
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, 4, first=first)
        assert optimizer.scales()["default"] > 0


def test_a_member_with_iterates_of_its_own_switches_them():
    model = mlp()
    weights, biases = split(model)
    base = Together(schedulefree.AdamWScheduleFree(weights, lr=1.0), optim.AdamW(biases, lr=1.0))
    optimizer = Mechanic(base)
    start = train_loss(model)
    optimizer.train()
    train(model, optimizer, 60)
    at_training = values_of(model)
    optimizer.eval()
    assert train_loss(model) < start / 2
    moved = [not torch.allclose(a, b) for a, b in zip(at_training, values_of(model), strict=True)]
    assert moved == [p.ndim == 2 for p in model.parameters()]


def test_a_schedule_that_cycles_momentum_says_that_not_all_have_one():
    optimizer = Mechanic(sgd_adamw(mlp()))
    with pytest.raises(ValueError, match="momentum"):
        OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    OneCycleLR(optimizer, max_lr=1.0, total_steps=10, cycle_momentum=False)


def test_a_scaler_unscales_all_of_them():
    models = mlp(), mlp()
    plain, scaled = (Mechanic(sgd_adamw(model)) for model in models)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        for model in models:
            model.zero_grad()
            backward(model, step)
        for p in models[1].parameters():
            p.grad *= 1024.0
        plain.step()
        scaler.scale(torch.ones(()))  # it makes its scale when it is first used
        scaler.step(scaled)
        scaler.update()
    for a, b in zip(values_of(models[0]), values_of(models[1]), strict=True):
        torch.testing.assert_close(a, b)
