"""Mechanic as a class, for trainers that are configured with one."""

import inspect
import pickle

import pytest
import pytorch_optimizer
import torch

from mechanic import TunerConfig
from mechanic.torch import Mechanic, MechanicAdamW, MechanicSGD, mechanic_class
from tests.torch.task import mlp, same_bits, snapshot, train


@pytest.mark.parametrize("cls", [MechanicAdamW, MechanicSGD, mechanic_class(pytorch_optimizer.Lion)])
def test_instances_are_mechanics_around_the_base(cls):
    model = mlp()
    optimizer = cls(model.parameters(), lr=0.1, weight_decay=0.001)
    assert isinstance(optimizer, Mechanic)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.001
    assert type(optimizer.base) is cls.base_class
    assert train(model, optimizer, 60) < 1.5


def test_a_class_and_an_instance_give_the_same_bits():
    models = mlp(), mlp()
    optimizers = [
        MechanicAdamW(models[0].parameters(), lr=0.3),
        Mechanic(torch.optim.AdamW(models[1].parameters(), lr=0.3)),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 5)
    assert same_bits(*(snapshot(m, o) for m, o in zip(models, optimizers, strict=True)))


def test_config_may_be_a_dict_and_lr_positional_or_left_out():
    params = [torch.nn.Parameter(torch.ones(2))]
    assert MechanicAdamW(params, config={"decay": 0.1}).config == TunerConfig(decay=0.1)
    assert MechanicAdamW(params, config=TunerConfig.paper()).config == TunerConfig.paper()
    assert MechanicSGD(params, 0.5).param_groups[0]["lr"] == 0.5
    assert MechanicAdamW(params, peak_lr=0.5, process_group=None).param_groups[0]["mechanic_unit"] == 0.5


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.RAdam, pytorch_optimizer.Lion])
def test_classes_pickle_and_are_made_once(base):
    cls = mechanic_class(base)
    assert mechanic_class(base) is mechanic_class(base_class=base) is cls
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert cls.__name__ == f"Mechanic{base.__name__}"


class MyAdamW(MechanicAdamW):
    pass


def test_a_subclass_pickles_as_itself():
    assert pickle.loads(pickle.dumps(MyAdamW)) is MyAdamW
    assert type(pickle.loads(pickle.dumps(MyAdamW([torch.nn.Parameter(torch.ones(2))])))) is MyAdamW


def test_the_signature_shows_the_bases_arguments_and_mechanics():
    names = list(inspect.signature(MechanicAdamW).parameters)
    assert names[:2] == ["params", "lr"]
    assert {"weight_decay", "config", "per_group", "skip_nonfinite"} <= set(names)


def test_a_base_keeps_an_option_that_mechanic_has_as_well():
    adamp = mechanic_class(pytorch_optimizer.AdamP)
    assert "delta" in inspect.signature(adamp).parameters
    model = mlp()
    optimizer = adamp(model.parameters(), delta=0.2, config={"decay": 0.1})
    assert optimizer.base.defaults["delta"] == 0.2
    assert optimizer.config.decay == 0.1
    train(model, optimizer, 3)


def test_printed_it_says_what_it_is():
    text = repr(MechanicSGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
    assert text.startswith("MechanicSGD(SGD, ")
    assert "mechanic_tuner" not in text


@pytest.mark.parametrize(("ours", "base"), [(MechanicAdamW, torch.optim.AdamW), (MechanicSGD, torch.optim.SGD)])
def test_arguments_that_are_not_given_are_those_of_the_base(ours, base):
    defaults = base([torch.nn.Parameter(torch.ones(2))]).defaults
    assert ours([torch.nn.Parameter(torch.ones(2))]).defaults == defaults
