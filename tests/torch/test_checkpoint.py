"""The checkpoint's contract: what is in one, what is accepted, what is refused and why."""

import copy
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mechanic import TunerConfig
from mechanic.torch import Mechanic, layer_groups
from tests.torch.task import mlp, same_bits, scale, snapshot, train

VERSION_1 = Path(__file__).parent / "data" / "checkpoint_v1.pt"


def wrapped(model, **options):
    return Mechanic(torch.optim.AdamW(model.parameters(), lr=1e-3), **options)


@pytest.fixture
def trained():
    model = mlp()
    optimizer = wrapped(model)
    train(model, optimizer, 5)
    return model, optimizer


def test_a_checkpoint_holds_only_what_every_route_can_carry(trained):
    state_dict = trained[1].state_dict()
    group, state = state_dict["param_groups"][0], state_dict["state"][0]
    assert group["mechanic_format"] == 1
    assert group["mechanic_base"] == "AdamW"
    assert group["mechanic_row"] == 0
    assert group["mechanic_unit"] == 1e-3
    assert group["mechanic_tuner"].shape == (15, 5)
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "mechanic_delta"}
    added = {key for key in group if key.startswith("mechanic_")}
    assert all(isinstance(group[key], (int, float, str, torch.Tensor)) for key in added)
    assert set(state_dict["state"]) == set(range(4))


def test_a_version_1_checkpoint_loads():
    saved = torch.load(VERSION_1, weights_only=True)
    model = mlp(hidden=2, seed=1)
    optimizer = wrapped(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert scale(optimizer) == saved["scale"] > 0
    assert optimizer.learned_rates() == optimizer.scales()  # the mean begins anew
    train(model, optimizer, 5, first=5)
    assert scale(optimizer) == pytest.approx(saved["scale_5_steps_later"], rel=1e-4)


def test_a_newer_format_is_refused(trained):
    state_dict = copy.deepcopy(trained[1].state_dict())
    group = state_dict["param_groups"][0]
    group["mechanic_format"] = 2
    said = r"mechanic_format.*checkpoint has 2, this optimizer has 1; .* upgrade mechanic"
    with pytest.raises(ValueError, match=said):
        wrapped(mlp()).load_state_dict(state_dict)
    del group["mechanic_row"]  # also if it has renamed its keys
    with pytest.raises(ValueError, match="upgrade mechanic"):
        wrapped(mlp()).load_state_dict(state_dict)


def test_the_constructors_config_wins_but_the_betas_must_match(trained):
    optimizer = wrapped(mlp(), config={"decay": 0.5})
    optimizer.load_state_dict(trained[1].state_dict())
    assert optimizer.config == TunerConfig(decay=0.5)
    other = wrapped(mlp(), config={"betas": (0.9, 0.99)})
    with pytest.raises(
        ValueError,
        match=r"betas in param_groups\[0\]\['mechanic_tuner'\]: .* has \[0\.99, 0\.999, .* has \[0\.9, 0\.99\]",
    ):
        other.load_state_dict(trained[1].state_dict())


def test_a_plain_checkpoint_is_a_warm_start_said_once():
    """An AdamW run in progress continues under Mechanic, with AdamW's moments and a fresh tuner."""
    model = mlp()
    plain = torch.optim.AdamW(model.parameters(), lr=3e-4)
    train(model, plain, 5)
    twin = copy.deepcopy(model)
    optimizer = wrapped(twin)
    with pytest.warns(UserWarning, match="fresh tuner") as said:
        optimizer.load_state_dict(plain.state_dict())
    assert len(said) == 1
    assert optimizer.state[twin[0].weight]["exp_avg"].equal(plain.state[model[0].weight]["exp_avg"])
    assert optimizer.param_groups[0]["mechanic_unit"] == 3e-4
    assert scale(optimizer) == 0
    twin[0].requires_grad_(False)
    train(twin, optimizer, 3, first=5)
    assert scale(optimizer) > 0
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_plain_checkpoint_does_not_take_the_tuners_names():
    model = mlp()
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    plain = torch.optim.AdamW(groups, lr=3e-4)
    train(model, plain, 2)
    named = [{**group, "tuner": name} for group, name in zip(groups, "ab", strict=True)]
    optimizer = Mechanic(torch.optim.AdamW(named, lr=1.0))
    with pytest.warns(UserWarning, match="fresh tuner"):
        optimizer.load_state_dict(plain.state_dict())
    train(model, optimizer, 3)
    assert list(optimizer.scales()) == ["a", "b"]


def test_a_plain_checkpoint_without_a_learning_rate_is_refused_and_nothing_is_loaded(trained):
    model, optimizer = trained
    plain = torch.optim.AdamW(mlp().parameters(), lr=0.0).state_dict()
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="every learning rate is 0"):
        optimizer.load_state_dict(plain)
    assert same_bits(before, snapshot(model, optimizer))
    train(model, optimizer, 1)


def test_a_checkpoint_loads_into_parameters_of_another_dtype(trained):
    model, optimizer = trained
    wide = copy.deepcopy(model).double()
    twin = wrapped(wide)
    twin.load_state_dict(optimizer.state_dict())
    train(wide, twin, 3, first=5)
    assert twin.state[wide[0].weight]["mechanic_delta"].dtype == torch.float64
    train(model, optimizer, 3, first=5)
    assert scale(twin) == pytest.approx(scale(optimizer), rel=1e-2)


def test_a_tuner_saved_where_there_is_no_float64_loads_where_there_is(trained):
    state_dict = copy.deepcopy(trained[1].state_dict())
    group = state_dict["param_groups"][0]
    group["mechanic_tuner"] = group["mechanic_tuner"].float()
    model = copy.deepcopy(trained[0])
    optimizer = wrapped(model)
    optimizer.load_state_dict(state_dict)
    train(model, optimizer, 2)
    assert optimizer.param_groups[0]["mechanic_tuner"].dtype == torch.float64


def test_resume_with_one_cycle_a_late_group_and_a_frozen_layer():
    def build():
        model = mlp()
        optimizer = Mechanic(torch.optim.AdamW(list(model[0].parameters()), lr=1.0))
        optimizer.add_param_group({"params": list(model[2].parameters()), "tuner": "head"})
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-3, 1e-2], total_steps=20)
        return model, optimizer, schedule

    parts = build()
    train(*parts[:2], 6, scheduler=parts[2])
    parts[0][0].requires_grad_(False)
    train(*parts[:2], 3, first=6, scheduler=parts[2])
    twins = build()
    for twin, state in zip(twins, [copy.deepcopy(part.state_dict()) for part in parts], strict=True):
        twin.load_state_dict(state)
    twins[0][0].requires_grad_(False)
    for model, optimizer, schedule in (parts, twins):
        train(model, optimizer, 3, first=9, scheduler=schedule)
        model[0].requires_grad_(True)
        train(model, optimizer, 3, first=12, scheduler=schedule)
    assert same_bits(snapshot(*parts[:2]), snapshot(*twins[:2]))


def test_hooks_on_saving_and_loading_see_mechanic_once(trained):
    _, optimizer = trained
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append(opt))
    optimizer.register_state_dict_post_hook(lambda opt, state_dict: {**state_dict, "extra": 1})
    state_dict = optimizer.state_dict()
    assert state_dict["extra"] == 1
    optimizer.register_load_state_dict_pre_hook(lambda opt, state_dict: seen.append(opt))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append(opt))
    optimizer.load_state_dict(state_dict)
    assert seen == [optimizer] * 3


def test_loading_leaves_the_callers_dict_alone_whatever_a_hook_does_to_its_own(trained):
    _, optimizer = trained
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: state_dict.update(extra=1))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert "extra" not in saved
    assert "mechanic_delta" in saved["state"][0]


FLAT, FULL = {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}


@pytest.mark.parametrize(
    ("base", "layout", "delta"),
    [
        *((torch.optim.AdamW, layout, None) for layout in ({}, FLAT, FULL)),
        *((torch.optim.AdamW, layout, "int8") for layout in ({}, FLAT)),
        (torch.optim.SGD, {}, None),
        (torch.optim.Adagrad, {}, None),
    ],
    ids=str,
)
def test_distributed_checkpoint_state_dicts_resume_bit_for_bit(base, layout, delta):
    """torch.distributed.checkpoint's own route, in one process: it steps on zero gradients to fill the state."""
    options = StateDictOptions(**layout)
    model = mlp()
    optimizer = Mechanic(base(model.parameters(), lr=0.1), skip_nonfinite=True, delta=delta)
    train(model, optimizer, 5)
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    twin_model = copy.deepcopy(model)
    twin = Mechanic(base(twin_model.parameters(), lr=0.1), skip_nonfinite=True, delta=delta)
    set_optimizer_state_dict(twin_model, twin, saved, options=options)
    assert twin.skipped_steps == 1
    train(model, optimizer, 5, first=5)
    train(twin_model, twin, 5, first=5)
    assert same_bits(snapshot(model, optimizer), snapshot(twin_model, twin))


def test_options_about_speed_may_differ_from_those_of_the_checkpoint(trained):
    model, optimizer = trained
    state_dict = copy.deepcopy(optimizer.state_dict())
    assert state_dict["param_groups"][0]["foreach"] is None
    state_dict["param_groups"][0]["foreach"] = True
    state_dict["param_groups"][0]["note"] = "text where the new one has None"
    again = wrapped(model)
    again.param_groups[0]["note"] = None
    again.load_state_dict(state_dict)
    assert again.param_groups[0]["foreach"] is True
    assert again.param_groups[0]["note"] == "text where the new one has None"


if __name__ == "__main__":  # how the committed checkpoint was made
    small = mlp(hidden=2)
    author = wrapped(small)
    train(small, author, 5)
    parts = copy.deepcopy({"model": small.state_dict(), "optimizer": author.state_dict(), "scale": scale(author)})
    train(small, author, 5, first=5)
    torch.save({**parts, "scale_5_steps_later": scale(author)}, VERSION_1)


@pytest.mark.filterwarnings("ignore:S is held by a bound")
@pytest.mark.parametrize("kind", ["usual", "int8", "bfloat16", "inside backward", "two tuners", "no gradient at first"])
def test_a_run_that_is_resumed_with_other_bounds_stays_where_it_is(kind):
    """A step at a learning rate of 0 moves nothing but what the bounds would."""

    def wrapped(model, config):
        groups = layer_groups(model) if kind == "two tuners" else model.parameters()
        optimizer = Mechanic(torch.optim.AdamW(groups, lr=1.0), config=config, delta="int8" if kind == "int8" else None)
        if kind == "inside backward":
            optimizer.step_in_backward()
        return optimizer

    model = mlp(dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    optimizer = wrapped(model, None)
    train(model, optimizer, 40)
    for config in (
        {"max_lr": min(optimizer.scales().values()) / 10},
        {"min_lr": 10 * max(optimizer.scales().values())},
    ):
        twin = copy.deepcopy(model)
        resumed = wrapped(twin, config)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for group in resumed.param_groups:
            group["lr"] = 0.0
        if kind == "no gradient at first":
            for p in twin.parameters():
                p.grad = torch.zeros_like(p)
            resumed.step()
        train(twin, resumed, 1)
        (bound,) = config.values()
        assert all(s == pytest.approx(bound, rel=1e-4) for s in resumed.scales().values())
        for p, x in zip(twin.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p, x, rtol=0.02 if kind in ("int8", "bfloat16") else 1e-4, atol=1e-4)
