"""timm's factory finds Mechanic by name, with its schedules and its layer decay."""

import runpy
import sys

import pytest
import torch

try:
    pytest.importorskip("torchvision", reason="has a folder of its own, with timm: make test-ecosystem")
except RuntimeError:
    # PyPI's build beside a torch for CPUs only: its operators are missing, of which timm needs none.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]

from timm.optim import _optim_factory, create_optimizer_v2, list_optimizers
from torch.optim.lr_scheduler import CosineAnnealingLR

import timm_factory
from mechanic.integrations.timm import register
from mechanic.torch import Mechanic, MechanicAdamW, MechanicSGD
from tests.ecosystem.proposed import define
from tests.torch.task import mlp, same_bits, snapshot, train


def test_the_factory_builds_and_trains_every_registered_name():
    for name in register():
        assert name in list_optimizers()
        model = mlp()
        optimizer = create_optimizer_v2(model, name, lr=1.0, weight_decay=0.01)
        assert isinstance(optimizer, Mechanic)
        assert len(optimizer.param_groups) == 2  # decay and no decay
        assert train(model, optimizer, 60, scheduler=CosineAnnealingLR(optimizer, 60)) < 1.0, name


def test_what_the_factory_builds_is_mechanic_around_what_it_builds_bare():
    register("nadamw")
    model, twin = mlp(), mlp()
    optimizer = create_optimizer_v2(model, "mechanicnadamw", lr=1.0, weight_decay=0.01, eps=1e-6)
    expected = Mechanic(create_optimizer_v2(twin, "nadamw", lr=1.0, weight_decay=0.01, eps=1e-6))
    for a, b in ((model, optimizer), (twin, expected)):
        train(a, b, 5)
    assert same_bits(snapshot(model, optimizer), snapshot(twin, expected))


def test_layer_decay_and_timms_schedule_are_shapes_too():
    register("adamw")
    losses, scales = zip(*((loss, o.scales()["default"]) for loss, o in map(learned, (1.0, 1e-3))), strict=True)
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert scales[0] == pytest.approx(scales[1], rel=0.05)
    assert losses[0] < 0.3


def learned(lr):
    loss, optimizer = timm_factory.train("mechanicadamw", lr)
    assert len({group["lr_scale"] for group in optimizer.param_groups}) > 2
    return loss, optimizer


def test_what_contrib_proposes_to_timm_builds_and_trains():
    registry = _optim_factory.OptimizerRegistry()
    define("_register_mechanic_optimizers", _optim_factory)(registry)
    for name, cls in {"mechanicadamw": MechanicAdamW, "mechanicsgd": MechanicSGD}.items():
        model = mlp()
        optimizer = registry.create_optimizer(model, name, lr=1.0, weight_decay=0.01, momentum=0.9, eps=1e-8)
        assert type(optimizer) is cls
        assert train(model, optimizer, 60, scheduler=CosineAnnealingLR(optimizer, 60)) < 1.0, name


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="adamwx"):
        register("adamwx")


def test_the_example_runs_as_it_stands(capsys):
    runpy.run_path(timm_factory.__file__, run_name="__main__")
    assert "mechaniclion: loss" in capsys.readouterr().out
