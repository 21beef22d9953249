"""The table of base optimizers. Every behaviour is tested with every row; a new base is a new row."""

import dataclasses
import inspect
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import optim

from mechanic.torch import Mechanic
from tests.torch.task import mlp


@dataclasses.dataclass(frozen=True)
class Base:
    name: str
    cls: type[optim.Optimizer]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tensor_lr: bool = False
    matrices_only: bool = False
    steps_by_an_earlier_lr: bool = False  # lr reaches the step through state, one step late
    loses_attributes_when_copied: bool = False  # after a deepcopy the bare base cannot step

    def make(self, params: Any, **options: Any) -> optim.Optimizer:
        options = {"lr": 1.0, **self.options, **options}
        if self.tensor_lr:
            options["lr"] = torch.tensor(options["lr"])
        return self.cls(params, **options)

    def wrap(self, model: torch.nn.Module, **options: Any) -> Mechanic:
        return Mechanic(self.make(model.parameters(), **options))

    def model(self, **options: Any) -> torch.nn.Module:
        return mlp(bias=not self.matrices_only, **options)

    @property
    def has_maximize(self) -> bool:
        return "maximize" in inspect.signature(self.cls).parameters


REFUSED_OF_TORCH = {"Optimizer", "LBFGS", "SparseAdam"}
PECULIAR = {
    "Muon": {"matrices_only": True},
    "ASGD": {"steps_by_an_earlier_lr": True},
    "Rprop": {"steps_by_an_earlier_lr": True},
}
THIRD_PARTY = ("Lion", "ADOPT", "SOAP", "Adan", "Lamb")

BASES = [
    *(
        Base(name, cls, **PECULIAR.get(name, {}))
        for name, cls in sorted(vars(optim).items())
        if inspect.isclass(cls) and issubclass(cls, optim.Optimizer) and name not in REFUSED_OF_TORCH
    ),
    Base("SGD momentum", optim.SGD, {"momentum": 0.9}),
    Base("SGD nesterov, weight decay", optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    Base("SGD fused", optim.SGD, {"momentum": 0.9, "fused": True}),
    Base("AdamW foreach", optim.AdamW, {"foreach": True}),
    Base("AdamW one by one", optim.AdamW, {"foreach": False}),
    Base("AdamW fused", optim.AdamW, {"fused": True}),
    Base("AdamW amsgrad", optim.AdamW, {"amsgrad": True}),
    Base("AdamW tensor lr", optim.AdamW, tensor_lr=True),
    Base("Adam fused", optim.Adam, {"fused": True}),
    Base("Adagrad fused", optim.Adagrad, {"fused": True}),
    Base("RMSprop momentum", optim.RMSprop, {"momentum": 0.9, "centered": True}),
    Base("NAdamW", optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.01}),
    *(Base(name, getattr(pytorch_optimizer, name), loses_attributes_when_copied=True) for name in THIRD_PARTY),
]
BY_NAME = {base.name: base for base in BASES}


def _over(bases: list[Base]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("base", [pytest.param(base, id=base.name.replace(" ", "-")) for base in bases])


def some_bases(*names: str) -> pytest.MarkDecorator:
    return _over([BY_NAME[name] for name in names])


every_base = _over(BASES)
