"""What a user writes; checked with mypy --strict."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import mechanic.jax
from mechanic import TunerConfig
from mechanic.torch import (
    Mechanic,
    MechanicAdamW,
    MechanicMuon,
    MechanicSGD,
    Together,
    layer_groups,
    mechanic_class,
    roles,
)


def train(model: nn.Module) -> torch.optim.AdamW:
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0), config=TunerConfig(decay=0.01))
    schedule = CosineAnnealingLR(optimizer, 100)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return float(loss)

    for _ in range(3):
        loss: float = optimizer.step(closure)
        schedule.step()
        print(loss, optimizer.scales()["default"], optimizer.learning_rates(), optimizer.nonfinite_steps)
    return optimizer.release()


def classes(model: nn.Module) -> list[Mechanic[torch.optim.AdamW] | Mechanic[torch.optim.SGD]]:
    return [
        MechanicAdamW(model.parameters(), lr=1.0, weight_decay=0.1, per_group=True, peak_lr=1.0),
        MechanicSGD(layer_groups(model), lr=1.0, momentum=0.9, config={"decay": 0.1}, process_group=None),
    ]


def another(model: nn.Module) -> torch.optim.RAdam:
    optimizer = mechanic_class(torch.optim.RAdam)(model.parameters(), lr=1.0, config=TunerConfig.paper())
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer.base


def muon(model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    optimizer = MechanicMuon(model, weight_decay=0.1, roles={"*.gate.weight": "vector"}, tuners="role")
    print(roles(model), roles(model)["matrix"].keys(), roles(model).of("0.weight"))
    return optimizer.release().members


def several(model: nn.Sequential) -> Mechanic[Together]:
    first, second = torch.optim.SGD(model[0].parameters(), lr=1.0), torch.optim.AdamW(model[1].parameters(), lr=1.0)
    return Mechanic(Together(first, second), per_group=True)


def in_jax() -> None:
    transformation = mechanic.jax.mechanize(optax.adamw(1.0))
    state = transformation.init(jnp.ones(3))
    print(mechanic.jax.scale(state), mechanic.jax.scales(state))
