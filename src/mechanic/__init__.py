"""Mechanic: learn the size of an optimizer's steps while training.

This package imports neither PyTorch nor JAX; ask for the framework you use:
``from mechanic.torch import Mechanic``, or ``from mechanic.jax import mechanize``.
"""

from mechanic.tuner import TunerConfig

__all__ = ["TunerConfig", "__version__"]
__version__ = "0.1.0"
