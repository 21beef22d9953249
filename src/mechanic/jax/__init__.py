"""Mechanic for JAX, as an Optax transformation."""

from mechanic.jax.keeping import freeze, release
from mechanic.jax.state import MechanicState, nonfinite_steps, scale, scales
from mechanic.jax.transform import mechanize

__all__ = ["MechanicState", "freeze", "mechanize", "nonfinite_steps", "release", "scale", "scales"]
