"""Low-rank adapters on a model whose own weights stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """A linear layer and a product of two narrow matrices, the second zero at first."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) + inputs @ self.down.T @ self.up.T


def adapt(model: nn.Module, rank: int) -> nn.Module:
    """Freeze all there is, and give every linear layer an adapter.

    The frozen weights become buffers: an optimizer of ``model.parameters()`` never sees them.
    """
    for module in list(model.modules()):
        for name, p in list(module._parameters.items()):
            if p is not None:
                del module._parameters[name]
                module.register_buffer(name, p.detach())
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child, rank))
    return model
