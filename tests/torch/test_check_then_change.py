"""A call that is refused, or a base that fails, leaves everything as it was."""

import copy
import importlib

import pytest
import pytorch_optimizer
import torch
from torch import nn, optim

from mechanic.torch import Mechanic
from tests.torch.task import backward, mlp, same_bits, scale, snapshot, train


def two_groups(model, **options):
    return [{"params": list(layer.parameters()), **options} for layer in (model[0], model[2])]


def whole(optimizer):
    """All that an optimizer holds, to compare: state by parameter, groups, and the parameters themselves."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    values = [p.detach().clone() for p in params]
    state = [copy.deepcopy(dict(optimizer.state.get(p, {}))) for p in params]
    groups = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return values, state, groups


def assert_same(before, after):
    assert repr_of(before) == repr_of(after)


def repr_of(value):
    """Comparable to the bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().flatten().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: repr_of(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [repr_of(entry) for entry in value]
    return repr(value)


# A base that fails.

FAILING = {
    "on Delta": lambda params: optim.AdamW(params, lr=1.0, weight_decay=0.1),
    "on Delta, SGD": lambda params: optim.SGD(params, lr=1.0, momentum=0.9),
    "on copies": lambda params: optim.AdamW(params, lr=torch.tensor(1.0), weight_decay=0.1),
}


def computed_by(base):
    """The module and the name of the function that computes the base's step. AdamW has Adam's in newer torch only."""
    module = importlib.import_module(type(base).step.__module__)
    return module, module.__name__.rpartition(".")[2]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", FAILING)
def test_a_base_that_fails_leaves_parameters_delta_and_tuner(name, when, monkeypatch):
    model = mlp(dtype=torch.float64)
    optimizer = Mechanic(FAILING[name](model.parameters()))
    train(model, optimizer, 8)  # young enough that Delta is still being forgotten
    module, function = computed_by(optimizer.base)
    inner = getattr(module, function)

    def fail(*args, **kwargs):
        if when == "after":
            inner(*args, **kwargs)
        raise MemoryError

    values = [p.detach().clone() for p in model.parameters()]
    deltas = [optimizer.state[p]["mechanic_delta"].clone() for p in model.parameters()]
    tuner = optimizer.param_groups[0]["mechanic_tuner"].clone()
    starts = [x - scale(optimizer) * d for x, d in zip(values, deltas, strict=True)]
    for _ in range(3):  # a retry fails as well
        backward(model, 8)
        monkeypatch.setattr(module, function, fail)
        with pytest.raises(MemoryError):
            optimizer.step()
        monkeypatch.undo()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["mechanic_tuner"].equal(tuner)
    for p, x, start, delta in zip(model.parameters(), values, starts, deltas, strict=True):
        now = optimizer.state[p]["mechanic_delta"]
        torch.testing.assert_close(p.detach() - scale(optimizer) * now, start, rtol=1e-10, atol=1e-12)
        if when == "before" or name == "on copies":
            torch.testing.assert_close(now, delta, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(p.detach(), x, rtol=1e-12, atol=1e-14)
    assert optimizer.param_groups[0]["weight_decay"] in (0.1, 0)
    train(model, optimizer, 3)


@pytest.mark.parametrize("base", [optim.SGD, optim.AdamW])
def test_a_base_that_fails_at_the_first_step_of_new_parameters_leaves_them_where_they_were(base, monkeypatch):
    old, new = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = Mechanic(base([old], lr=1.0))
    for _ in range(5):
        old.grad = old.detach() - 3
        optimizer.step()
    optimizer.add_param_group({"params": [new]})
    module, function = computed_by(optimizer.base)
    inner = getattr(module, function)

    def fail(*args, **kwargs):
        inner(*args, **kwargs)
        raise MemoryError

    for p in (old, new):
        p.grad = p.detach() - 3
    monkeypatch.setattr(module, function, fail)
    with pytest.raises(MemoryError):
        optimizer.step()
    monkeypatch.undo()
    delta = optimizer.state.get(new, {}).get("mechanic_delta", torch.zeros_like(new))
    torch.testing.assert_close(new.detach() - scale(optimizer) * delta, torch.ones_like(new), rtol=1e-12, atol=0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()


# Groups.


def test_a_refused_group_is_not_added():
    model = mlp()
    optimizer = Mechanic(optim.AdamW(list(model[0].parameters()), lr=1.0), per_group=True)
    train(model, optimizer, 3)
    before = whole(optimizer)
    with pytest.raises(ValueError, match="every learning rate is 0"):
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.0})
    assert_same(before, whole(optimizer))
    optimizer.freeze()
    before = whole(optimizer)
    with pytest.raises(ValueError, match="the scales are frozen"):
        optimizer.add_param_group({"params": list(model[2].parameters())})
    assert_same(before, whole(optimizer))
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
    first, second, third = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))

    def step(optimizer, params):
        for p in params:
            p.grad = p.detach() - 3
        optimizer.step()

    optimizer = Mechanic(optim.AdamW([{"params": [p]} for p in (first, second, third)], lr=1.0), per_group=True)
    alone = Mechanic(optim.AdamW([nn.Parameter(torch.ones(3, dtype=torch.float64))], lr=1.0))
    for _ in range(10):
        step(optimizer, (first, second, third))
        step(alone, alone.param_groups[0]["params"])
    del optimizer.param_groups[1]
    del optimizer.state[second]
    new = nn.Parameter(1e3 * torch.ones(3, dtype=torch.float64))
    optimizer.add_param_group({"params": [new]})
    for _ in range(10):
        step(optimizer, (first, third, new))
        step(alone, alone.param_groups[0]["params"])
    innocent = [float(scale) for scale in optimizer.scales().values()][:2]
    assert innocent == pytest.approx([scale(alone)] * 2)
    assert len({group["mechanic_row"] for group in optimizer.param_groups}) == 3


# Loading.


def adamw():
    model = mlp()
    optimizer = Mechanic(optim.AdamW(model.parameters(), lr=1.0))
    train(model, optimizer, 3)
    return model, optimizer


def of_another_base(make):
    model = mlp()
    optimizer = Mechanic(make(model.parameters()))
    train(model, optimizer, 3)
    return optimizer.state_dict()


OTHERS = [(name, ours) for name in ("SGD", "Adagrad", "RMSprop", "NAdam") for ours in (True, False)]
OTHERS.remove(("NAdam", False))  # its moments are AdamW's, so AdamW can start from them


@pytest.mark.parametrize(("name", "ours"), OTHERS)
def test_the_checkpoint_of_another_base_is_refused_and_nothing_is_loaded(name, ours):
    model, optimizer = adamw()
    saved = of_another_base(lambda params: getattr(optim, name)(params, lr=1.0))
    if not ours:
        other = mlp()
        base = getattr(optim, name)(other.parameters(), lr=1.0)
        train(other, base, 3)
        saved = base.state_dict()
    before = whole(optimizer)
    with pytest.raises(ValueError, match=name if ours else "checkpoint|state"):
        optimizer.load_state_dict(saved)
    assert_same(before, whole(optimizer))
    twin_model = copy.deepcopy(model)
    twin = Mechanic(optim.AdamW(twin_model.parameters(), lr=1.0))
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (twin_model, twin)):
        train(m, o, 2, first=3)
    assert same_bits(snapshot(model, optimizer), snapshot(twin_model, twin))


def test_a_base_that_fails_to_load_is_put_back():
    class Failing(optim.SGD):
        fails = False

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            self.extra = 1
            if self.fails:
                raise KeyError("step")

    model = mlp()
    optimizer = Mechanic(Failing(model.parameters(), lr=1.0, momentum=0.9))
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 3)
    before = whole(optimizer)
    optimizer.base.fails = True
    with pytest.raises(ValueError, match="the checkpoint could not be loaded: KeyError: 'step'"):
        optimizer.load_state_dict(saved)
    assert_same(before, whole(optimizer))
    assert not hasattr(optimizer.base, "extra")
    train(model, optimizer, 2)


def group_entry(key, value):
    def mutate(state_dict):
        state_dict["param_groups"][0][key] = value(state_dict["param_groups"][0][key])

    return mutate


def state_entry(key, value):
    def mutate(state_dict):
        state_dict["state"][1][key] = value(state_dict["state"][1][key])

    return mutate


HOSTILE = {
    "a tuner of 7 rows": (group_entry("mechanic_tuner", lambda t: t[:7]), "mechanic_tuner"),
    "a tuner of 20 rows": (group_entry("mechanic_tuner", lambda t: torch.cat([t, t])[:20]), "mechanic_tuner"),
    "a longer Delta": (state_entry("mechanic_delta", lambda d: torch.cat([d, d])), "mechanic_delta"),
    "no tensor for Delta": (state_entry("mechanic_delta", lambda d: "a"), "mechanic_delta"),
    "no unit": (lambda sd: sd["param_groups"][0].pop("mechanic_unit"), "mechanic_unit"),
    "no groups": (lambda sd: sd.update(param_groups=[]), "param_groups"),
    "another format": (group_entry("mechanic_format", lambda f: 7), "mechanic_format"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_name_of_its_entry(name):
    mutate, entry = HOSTILE[name]
    model, optimizer = adamw()
    saved = copy.deepcopy(optimizer.state_dict())
    mutate(saved)
    train(model, optimizer, 2)
    before = whole(optimizer)
    with pytest.raises(ValueError, match=entry):
        optimizer.load_state_dict(saved)
    assert_same(before, whole(optimizer))


def test_tuners_of_other_names_are_refused():
    model, other = mlp(), mlp()

    def named(model, names):
        groups = [{**group, "tuner": name} for group, name in zip(two_groups(model), names, strict=True)]
        return Mechanic(optim.AdamW(groups, lr=1.0))

    optimizer, twin = named(model, "ab"), named(other, "ba")
    train(model, optimizer, 3)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['tuner'\]: the checkpoint has a, this optimizer has b"):
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))


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
    for m, o in ((model, optimizer), (twin_model, twin)):
        train(m, o, 3, first=6)
    assert same_bits(snapshot(model, optimizer), snapshot(twin_model, twin))


def test_a_step_that_had_only_an_observation_can_be_saved_and_loaded():
    p = nn.Parameter(torch.ones(3))
    optimizer = Mechanic(optim.SGD([p], lr=1.0))
    p.grad = p.detach() - 3
    optimizer.observe()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_run_can_go_back_to_before_its_first_step():
    """Also where the base writes new entries into its groups as it steps."""
    p = nn.Parameter(torch.ones(3))
    optimizer = Mechanic(pytorch_optimizer.Lion([p], lr=1.0))
    start = copy.deepcopy(optimizer.state_dict())
    p.grad = p.detach() - 3
    optimizer.step()
    optimizer.load_state_dict(start)
    assert optimizer.scales() == {"default": 0}


def test_parameters_that_were_removed_before_a_load_are_not_missed_after_it():
    params = {name: nn.Parameter(torch.ones(2)) for name in "abc"}

    def step(optimizer):
        for p in params.values():
            p.grad = p.detach() - 3
        optimizer.step()

    optimizer = Mechanic(optim.AdamW([{"params": [p], "tuner": name} for name, p in params.items()], lr=1.0))
    step(optimizer)
    optimizer.param_groups.pop(0)
    optimizer.state.pop(params["a"])
    bare = optim.AdamW([{"params": [params[name]]} for name in "bc"], lr=1.0)
    step(bare)
    with pytest.warns(UserWarning, match="fresh tuner"):
        optimizer.load_state_dict(bare.state_dict())
    step(optimizer)


def test_a_new_tuner_takes_nothing_over_from_one_that_is_gone():
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def fill_grads():
        for p in (a, b, c):
            p.grad = p.detach() - 3

    optimizer = Mechanic(optim.AdamW([{"params": [a], "tuner": "a"}, {"params": [b], "tuner": "b"}], lr=1.0))
    for _ in range(3):
        fill_grads()
        optimizer.step()
    fill_grads()
    optimizer.observe()
    optimizer.param_groups.pop(1)
    optimizer.state.pop(b)
    optimizer.add_param_group({"params": [c], "tuner": "c"})
    fill_grads()
    optimizer.step()
    assert optimizer.scales()["c"] == 0  # the observation was of another tuner
    optimizer.param_groups.pop(0)
    optimizer.add_param_group({"params": [a, b], "tuner": "d"})  # parameters may change their tuner, with their state
    for _ in range(2):
        fill_grads()
        optimizer.step()
    assert all(optimizer.scales().values())


# Observations.


def observed(optimizer, model):
    backward(model, 100)
    optimizer.observe()


def test_an_observation_does_not_survive_a_load():
    model, optimizer = adamw()
    saved = copy.deepcopy(optimizer.state_dict())
    twin_model = copy.deepcopy(model)
    twin = Mechanic(optim.AdamW(twin_model.parameters(), lr=1.0))
    twin.load_state_dict(copy.deepcopy(saved))
    observed(optimizer, model)
    optimizer.load_state_dict(saved)
    for m, o in ((model, optimizer), (twin_model, twin)):
        train(m, o, 2, first=3)
    assert same_bits(snapshot(model, optimizer), snapshot(twin_model, twin))


def test_an_observation_survives_deepcopy():
    model, optimizer = adamw()
    observed(optimizer, model)
    twin_model, twin = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (twin_model, twin)):
        train(m, o, 2, first=3)
    assert same_bits(snapshot(model, optimizer), snapshot(twin_model, twin))


def test_a_tuner_that_was_added_since_has_not_been_observed():
    model = mlp()
    optimizer = Mechanic(optim.AdamW(list(model[0].parameters()), lr=1.0))
    train(model, optimizer, 3)
    observed(optimizer, model)
    former = optimizer.scales()["default"]
    optimizer.add_param_group({"params": list(model[2].parameters()), "tuner": "new"})
    train(model, optimizer, 1, first=3)
    assert optimizer.scales()["default"] != former
    assert optimizer.scales()["new"] == 0
    train(model, optimizer, 3, first=4)
    assert optimizer.scales()["new"] > 0
