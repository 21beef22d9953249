"""The base optimizers and the settings that the campaign runs with."""

import dataclasses
from typing import Any

import pytorch_optimizer
import schedulefree
import torch
from torch import optim

from mechanic import TunerConfig

CONFIGS = {
    "default": TunerConfig(),
    "without forgetting": TunerConfig(forgetting=0.0),
    "paper": TunerConfig.paper(),
}


@dataclasses.dataclass(frozen=True)
class Base:
    name: str
    cls: type[optim.Optimizer]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    takes_complex: bool = True
    matrices_only: bool = False
    own_iterates: bool = False
    can_be_copied: bool = True  # False: deepcopy or pickle of the bare base loses what its step needs
    lr_acts_at_once: bool = True  # False: the bare base moves parameters at lr = 0 as well
    takes_expanded_gradients: bool = True  # of stride 0; False: the bare base fails, or reads past their end
    is_linear_in_lr: bool = True

    @property
    def may_step_on_delta(self) -> bool:
        """docs/how-it-works.md lists the bases that do."""
        names = "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop"
        return self.cls.__name__ in names and not self.options.get("weight_decay")

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Mostly float64, where rounding hides nothing."""
        others = [torch.float32, torch.bfloat16, torch.float16]
        if self.takes_complex:
            others.append(torch.complex64)
        return [torch.float64] * 3 + others

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [(2, 2), (3, 2), (1, 2), (2, 1)] if self.matrices_only else [(3,), (2, 2), (), (4,)]


LATE_LR = {"lr_acts_at_once": False, "is_linear_in_lr": False}
OF_OTHERS = {"can_be_copied": False, "takes_complex": False}

BASES = [
    Base("SGD", optim.SGD),
    Base("SGD momentum", optim.SGD, {"momentum": 0.9}),
    Base("SGD nesterov", optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    Base("Adam", optim.Adam),
    Base("AdamW", optim.AdamW),
    Base("AdamW one by one", optim.AdamW, {"foreach": False}),
    Base("AdamW fused", optim.AdamW, {"fused": True}, takes_complex=False, takes_expanded_gradients=False),
    Base("NAdam", optim.NAdam),
    Base("RAdam", optim.RAdam),
    Base("Adamax", optim.Adamax),
    Base("Adagrad", optim.Adagrad),
    Base("Adadelta", optim.Adadelta),
    Base("RMSprop", optim.RMSprop, {"momentum": 0.9}),
    Base("Rprop", optim.Rprop, **LATE_LR),
    Base("ASGD", optim.ASGD, **LATE_LR),
    Base("Adafactor", optim.Adafactor, takes_complex=False, is_linear_in_lr=False),
    *(
        Base(name, getattr(optim, name), takes_complex=False, matrices_only=True)
        for name in ("Muon",)
        if hasattr(optim, name)  # younger than the oldest torch we support
    ),
    *(Base(name, getattr(pytorch_optimizer, name), **OF_OTHERS) for name in ("Lion", "ADOPT", "Adan", "Lamb")),
    Base(
        "AdamWScheduleFree",
        schedulefree.AdamWScheduleFree,
        takes_complex=False,
        own_iterates=True,
        lr_acts_at_once=False,  # its average moves on
        takes_expanded_gradients=False,
    ),
]
BY_NAME = {base.name: base for base in BASES}
