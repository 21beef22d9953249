"""A call that is refused leaves everything as it was, and what is gone leaves nothing behind."""

import copy

import pytest
import pytorch_optimizer
import torch
from torch import nn, optim

from mechanic.torch import Mechanic
from tests.torch.hostile import everything, what_changed
from tests.torch.task import assert_go_on_alike, backward, mlp, pull, scale, train


def two_groups(model, **options):
    return [{"params": list(layer.parameters()), **options} for layer in (model[0], model[2])]


# Groups.


def test_a_refused_group_is_not_added():
    model = mlp()
    optimizer = Mechanic(optim.AdamW(list(model[0].parameters()), lr=1.0), per_group=True)
    train(model, optimizer, 3)
    before = copy.deepcopy(everything(model, optimizer))
    with pytest.raises(ValueError, match="every learning rate is 0"):
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.0})
    assert what_changed(before, everything(model, optimizer)) == ""
    optimizer.freeze()
    before = copy.deepcopy(everything(model, optimizer))
    with pytest.raises(ValueError, match="frozen, and tuner 'group 1' has none yet"):
        optimizer.add_param_group({"params": list(model[2].parameters())})
    assert what_changed(before, everything(model, optimizer)) == ""
    train(model, optimizer, 3)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
def test_a_base_that_was_refused_can_be_wrapped_once_mended(lr):
    model = mlp()
    base = optim.AdamW(two_groups(model), lr=1.0)
    base.param_groups[1]["lr"] = lr
    with pytest.raises(ValueError, match="learning rate"):
        Mechanic(base, per_group=True)
    assert not any(key.startswith("mechanic") for group in base.param_groups for key in group)
    base.param_groups[1]["lr"] = 1.0
    train(model, Mechanic(base, per_group=True), 3)


def test_after_a_group_is_removed_a_new_one_gets_a_tuner_of_its_own():
    first, second, third, single = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(4))
    optimizer = Mechanic(optim.AdamW([{"params": [p]} for p in (first, second, third)], lr=1.0), per_group=True)
    alone = Mechanic(optim.AdamW([single], lr=1.0))
    pull(optimizer, 10)
    del optimizer.param_groups[1]
    del optimizer.state[second]
    optimizer.add_param_group({"params": [nn.Parameter(1e3 * torch.ones(3, dtype=torch.float64))]})
    pull(optimizer, 10)
    pull(alone, 20)
    innocent = [float(scale) for scale in optimizer.scales().values()][:2]
    assert innocent == pytest.approx([scale(alone)] * 2)
    assert len({group["mechanic_row"] for group in optimizer.param_groups}) == 3


# Loading.


def test_a_run_whose_groups_were_removed_and_added_resumes_in_a_new_optimizer():
    """Rows are numbers of this optimizer: those of the checkpoint may have gaps."""
    model = mlp()
    optimizer = Mechanic(optim.AdamW(two_groups(model), lr=1.0), per_group=True)
    train(model, optimizer, 3)
    extra = optimizer.param_groups.pop(0)
    for p in extra["params"]:
        del optimizer.state[p]
    optimizer.add_param_group({"params": extra["params"]})
    train(model, optimizer, 3)
    twin_model = copy.deepcopy(model)
    twin = Mechanic(optim.AdamW(two_groups(twin_model)[::-1], lr=1.0), per_group=True)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_go_on_alike((model, optimizer), (twin_model, twin), steps=3, first=6)


def test_a_step_that_had_only_an_observation_can_be_saved_and_loaded():
    p = nn.Parameter(torch.ones(3))
    optimizer = Mechanic(optim.SGD([p], lr=1.0))
    p.grad = p.detach() - 3
    optimizer.observe()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_run_can_go_back_to_before_its_first_step():
    """Also where the base writes new entries into its groups as it steps."""
    optimizer = Mechanic(pytorch_optimizer.Lion([nn.Parameter(torch.ones(3))], lr=1.0))
    start = copy.deepcopy(optimizer.state_dict())
    pull(optimizer)
    optimizer.load_state_dict(start)
    assert optimizer.scales() == {"default": 0}


def test_parameters_that_were_removed_before_a_load_are_not_missed_after_it():
    params = {name: nn.Parameter(torch.ones(2)) for name in "abc"}
    optimizer = Mechanic(optim.AdamW([{"params": [p], "tuner": name} for name, p in params.items()], lr=1.0))
    pull(optimizer)
    optimizer.param_groups.pop(0)
    optimizer.state.pop(params["a"])
    bare = optim.AdamW([{"params": [params[name]]} for name in "bc"], lr=1.0)
    pull(bare)
    with pytest.warns(UserWarning, match="fresh tuner"):
        optimizer.load_state_dict(bare.state_dict())
    pull(optimizer)


def test_a_new_tuner_takes_nothing_over_from_one_that_is_gone():
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = Mechanic(optim.AdamW([{"params": [a], "tuner": "a"}, {"params": [b], "tuner": "b"}], lr=1.0))
    pull(optimizer, 3)
    for p in (a, b):
        p.grad = p.detach() - 3
    optimizer.observe()
    optimizer.param_groups.pop(1)
    optimizer.state.pop(b)
    optimizer.add_param_group({"params": [c], "tuner": "c"})
    pull(optimizer)
    assert optimizer.scales()["c"] == 0  # the observation was of another tuner
    optimizer.param_groups.pop(0)
    optimizer.add_param_group({"params": [a, b], "tuner": "d"})  # parameters may change their tuner, with their state
    pull(optimizer, 2)
    assert all(optimizer.scales().values())


# Observations.


def observed():
    model = mlp()
    optimizer = Mechanic(optim.AdamW(model.parameters(), lr=1.0))
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    backward(model, 100)
    optimizer.observe()
    return model, optimizer, saved


def test_an_observation_does_not_survive_a_load_but_a_deepcopy():
    model, optimizer, saved = observed()
    assert_go_on_alike((model, optimizer), copy.deepcopy((model, optimizer)), steps=2, first=3)
    model, optimizer, saved = observed()
    twin_model = copy.deepcopy(model)
    twin = Mechanic(optim.AdamW(twin_model.parameters(), lr=1.0))
    twin.load_state_dict(copy.deepcopy(saved))
    optimizer.load_state_dict(saved)
    assert_go_on_alike((model, optimizer), (twin_model, twin), steps=2, first=3)


def test_a_tuner_that_was_added_since_has_not_been_observed():
    model = mlp()
    optimizer = Mechanic(optim.AdamW(list(model[0].parameters()), lr=1.0))
    train(model, optimizer, 3)
    backward(model, 100)
    optimizer.observe()
    former = optimizer.scales()["default"]
    optimizer.add_param_group({"params": list(model[2].parameters()), "tuner": "new", "lr": 1e-4})
    assert optimizer.scales()["new"] == 0
    train(model, optimizer, 1, first=3)
    assert optimizer.scales()["default"] != former
    assert optimizer.scales()["new"] == 0
    train(model, optimizer, 3, first=4)
    assert optimizer.scales()["new"] > 0
