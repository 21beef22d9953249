"""For timm's optimizer factory."""

from __future__ import annotations

import dataclasses

from timm.optim._optim_factory import default_registry

from mechanic.torch import mechanic_class

__all__ = ["register"]


def register(*names: str) -> list[str]:
    """Let timm's factory find Mechanic around its optimizers: ``mechanicadamw`` for ``adamw``.

    Args:
        names: of timm's optimizers; without any, AdamW, NAdamW, SGD with Nesterov's and with classical momentum, Lion
            and LAMB.

    Returns:
        The new names, for ``create_optimizer_v2(model, "mechanicadamw", lr=1.0)`` or a script's ``--opt``. What timm
        knows of the base (its defaults, which arguments it takes) holds for the new name as well.
    """
    registered = []
    for name in names or ("adamw", "nadamw", "sgd", "momentum", "lion", "lamb"):
        info = default_registry.get_optimizer_info(name)
        base_class = default_registry.get_optimizer_class(info, bind_defaults=False)
        info = dataclasses.replace(
            info,
            name=f"mechanic{name}",  # timm splits names at underscores
            opt_class=mechanic_class(base_class),
            description=f"Mechanic, which learns the learning rate, around: {info.description}",
        )
        default_registry.register(info)
        registered.append(info.name)
    return registered
