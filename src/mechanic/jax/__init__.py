"""Mechanic for JAX, as an Optax transformation."""

from mechanic.jax.keeping import freeze, release
from mechanic.jax.state import MechanicState, scale, scales
from mechanic.jax.transform import mechanize

__all__ = ["MechanicState", "freeze", "mechanize", "release", "scale", "scales"]
