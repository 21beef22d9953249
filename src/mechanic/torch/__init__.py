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

from mechanic.torch.factory import MechanicAdamW, MechanicMuon, MechanicSGD, mechanic_class
from mechanic.torch.optimizer import Mechanic
from mechanic.torch.roles import Roles, layer_groups, roles
from mechanic.torch.together import Together

__all__ = [
    "Mechanic",
    "MechanicAdamW",
    "MechanicMuon",
    "MechanicSGD",
    "Roles",
    "Together",
    "layer_groups",
    "mechanic_class",
    "roles",
]
