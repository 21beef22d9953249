"""Mechanic: learn the size of an optimizer's steps while training.

This package imports neither PyTorch nor JAX; ask for the framework you use:
``from mechanic.torch import Mechanic``, or ``from mechanic.jax import mechanize``.
"""

from mechanic.config import TunerConfig

__all__ = ["TunerConfig", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> None:
    if name in ("Mechanic", "MechanicAdamW", "MechanicSGD", "layer_groups", "mechanic_class", "mechanize"):
        in_torch = "Mechanic" if name == "mechanize" else name
        raise ImportError(
            f"mechanic has one module per framework: write `from mechanic.torch import {in_torch}`"
            + (", or `from mechanic.jax import mechanize` for JAX" if name in ("Mechanic", "mechanize") else "")
        )
    raise AttributeError(f"module 'mechanic' has no attribute {name!r}")
