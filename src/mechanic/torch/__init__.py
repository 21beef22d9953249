"""Mechanic for PyTorch."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name == "torch":
        raise ModuleNotFoundError(
            'mechanic.torch needs PyTorch: pip install "mechanic[torch]", or install PyTorch as pytorch.org says',
            name="torch",
        ) from error
    raise

from mechanic.torch.classes import MechanicAdamW, MechanicSGD, mechanize
from mechanic.torch.groups import layer_groups
from mechanic.torch.optimizer import Mechanic

__all__ = ["Mechanic", "MechanicAdamW", "MechanicSGD", "layer_groups", "mechanize"]
