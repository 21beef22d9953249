"""Mechanic for PyTorch."""

from mechanic.torch.classes import MechanicAdamW, MechanicSGD, mechanize
from mechanic.torch.groups import layer_groups
from mechanic.torch.optimizer import Mechanic

__all__ = ["Mechanic", "MechanicAdamW", "MechanicSGD", "layer_groups", "mechanize"]
