"""What LoRA trainers ask of an optimizer: each test calls as one of them does, in a few lines of our own."""

import ast
import importlib

import pytest
import torch

from mechanic.torch import Mechanic, MechanicAdamW
from tests.torch.task import backward, mlp, train

STEPS = 20


def groups_of(model, **options):
    """Two networks in one optimizer, as a text encoder and a UNet are."""
    return [{"params": list(layer.parameters()), **options} for layer in (model[0], model[2])]


def step(model, optimizer, index):
    backward(model, index)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def test_sd_scripts_builds_it_from_a_dotted_path_and_strings_and_logs_d_times_lr():
    settings = {"optimizer_type": "mechanic.torch.MechanicAdamW", "learning_rate": 1e-4}
    optimizer_args = ["weight_decay=0.01", "betas=(0.9, 0.99)", "per_group=True", "config={'decay': 0.02}"]

    module, _, name = settings["optimizer_type"].rpartition(".")
    parsed = dict(argument.split("=", 1) for argument in optimizer_args)
    options = {key: ast.literal_eval(value) for key, value in parsed.items()}
    model = mlp()
    optimizer_class = getattr(importlib.import_module(module), name)
    optimizer = optimizer_class(groups_of(model, lr=1e-4), lr=settings["learning_rate"], **options)
    assert optimizer.config.decay == 0.02
    optimizer.train()  # is called wherever it is there, for Schedule-Free
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: min(1.0, index / 5))
    for index in range(STEPS):
        step(model, optimizer, index)
        warm_up.step()
        logged = [group["d"] * group["lr"] for group in warm_up.optimizer.param_groups]
    assert [float(rate) for rate in logged] == pytest.approx(list(optimizer.learning_rates().values()))
    assert len(set(map(float, logged))) == 2  # a scale for each network


def test_onetrainer_finds_d_in_groups_that_it_has_given_names_and_initial_rates():
    model = mlp()
    groups = [{**group, "name": name} for group, name in zip(groups_of(model, lr=3e-4, initial_lr=3e-4), "ab")]  # noqa: B905
    optimizer = MechanicAdamW(groups, lr=3e-4)
    train(model, optimizer, STEPS)
    for group in optimizer.param_groups:
        shown = group.get("effective_lr", group["lr"]) * group.get("d", 1.0)
        assert float(shown) == pytest.approx(optimizer.learning_rates()["default"])
    assert [group["name"] for group in optimizer.param_groups] == ["a", "b"]


def onetrainer_groups(model):
    groups = zip(groups_of(model, lr=3e-4, initial_lr=3e-4), ("text encoder", "unet"), strict=True)
    return [{**group, "name": name} for group, name in groups]


def onetrainer_loads(optimizer, saved):
    """Groups are found by name, and get a new rate; states are numbered anew; two keys are OneTrainer's own."""
    fresh = optimizer.state_dict()["param_groups"]
    state, groups = {}, []
    for group, name in zip(fresh, saved["param_group_mapping"], strict=True):
        old = saved["param_groups"][saved["param_group_mapping"].index(name)]
        numbers = range(len(state), len(state) + len(old["params"]))
        state.update({new: saved["state"][index] for new, index in zip(numbers, old["params"], strict=True)})
        groups.append({**old, "params": list(numbers), "lr": group["lr"], "initial_lr": group["initial_lr"]})
    saved["state"], saved["param_groups"] = state, groups
    optimizer.load_state_dict(saved)
    for entry in optimizer.state_dict()["state"].values():
        for value in entry.values():
            value.data = value.data.to("cpu")


def test_onetrainer_resumes_from_groups_that_it_has_sorted_by_name(tmp_path):
    model = mlp()
    optimizer = MechanicAdamW(onetrainer_groups(model), lr=3e-4, per_group=True)
    train(model, optimizer, STEPS)
    optimizer.zero_grad()
    names = {"param_group_mapping": ["text", "unet"], "param_group_optimizer_mapping": ["MECHANIC_ADAMW"] * 2}
    torch.save({**optimizer.state_dict(), **names}, tmp_path / "optimizer.pt")

    twin = mlp()
    twin.load_state_dict(model.state_dict())
    resumed = MechanicAdamW(onetrainer_groups(twin), lr=3e-4, per_group=True)
    onetrainer_loads(resumed, torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for index in range(STEPS):
        step(model, optimizer, index)
        step(twin, resumed, index)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("per_group", [True, False])
def test_onetrainer_may_add_a_group_that_was_not_saved_if_it_has_a_tuner_of_its_own(per_group):
    model = mlp()
    model[2].requires_grad_(False)
    optimizer = MechanicAdamW(onetrainer_groups(model)[:1], lr=3e-4, per_group=per_group)
    train(model, optimizer, STEPS)
    model[2].requires_grad_(True)
    longer = MechanicAdamW(onetrainer_groups(model), lr=3e-4, per_group=per_group)
    saved = optimizer.state_dict()
    saved["param_groups"].append(longer.state_dict()["param_groups"][1])
    if per_group:
        longer.load_state_dict(saved)
        assert list(longer.scales().values()) == [*optimizer.scales().values(), 0.0]
        assert train(model, longer, STEPS) < 1
    else:
        with pytest.raises(ValueError, match="whose tuner it shares"):
            longer.load_state_dict(saved)


def test_ai_toolkit_asks_for_the_mean_learning_rate_and_sets_lr_back_after_loading():
    model = mlp()
    optimizer = MechanicAdamW(groups_of(model), lr=1e-4, per_group=True)
    train(model, optimizer, STEPS)
    rates = optimizer.learning_rates().values()
    assert optimizer.get_avg_learning_rate() == pytest.approx(sum(rates) / 2)

    twin_model = mlp()
    twin = MechanicAdamW(groups_of(twin_model), lr=1e-4, per_group=True)
    configured = [group["lr"] for group in twin.param_groups]
    twin.load_state_dict(optimizer.state_dict())
    for group, lr in zip(twin.param_groups, configured, strict=True):
        group["lr"] = group["initial_lr"] = lr
    assert twin.get_avg_learning_rate() == optimizer.get_avg_learning_rate()


# Stepping inside the backward pass.


def hook_all(model, on_gradient):
    return [p.register_post_accumulate_grad_hook(on_gradient) for p in model.parameters()]


def test_stepping_from_hooks_in_the_backward_pass_is_refused_before_anything_moves():
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))

    def step_and_clear(p):
        optimizer.step()
        p.grad = None

    hook_all(model, step_and_clear)
    with pytest.raises(RuntimeError, match="inside the backward pass, while 3 of 4 parameters have no gradient"):
        backward(model, 0)
    assert all(p.equal(b) for p, b in zip(model.parameters(), before, strict=True))
    assert not optimizer.state


def test_optimizers_whose_gradients_are_all_there_may_step_in_the_backward_pass():
    """sd-scripts' fused optimizer groups count hooks, and step a group when it is complete."""
    model, twin = mlp(), mlp()
    optimizers = [MechanicAdamW(layer.parameters()) for layer in (model[0], model[2])]
    owner = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    come = dict.fromkeys(optimizers, 0)

    def step_when_complete(p):
        optimizer = owner[p]
        come[optimizer] += 1
        if come[optimizer] == 2:
            optimizer.step()
            optimizer.zero_grad()
            come[optimizer] = 0

    hook_all(model, step_when_complete)
    expected = [MechanicAdamW(layer.parameters()) for layer in (twin[0], twin[2])]
    for index in range(STEPS):
        backward(model, index)
        backward(twin, index)
        for optimizer in expected:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a.equal(b)


def test_a_frozen_one_may_step_in_the_backward_pass_as_its_base_may():
    model = mlp()
    optimizer = MechanicAdamW(model.parameters())
    train(model, optimizer, STEPS)
    optimizer.zero_grad()
    optimizer.freeze()
    before = [p.detach().clone() for p in model.parameters()]
    handles = hook_all(model, lambda p: optimizer.step())
    backward(model, 0)
    assert not any(p.equal(b) for p, b in zip(model.parameters(), before, strict=True))
    for handle in handles:
        handle.remove()
