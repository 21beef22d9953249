"""Mechanic for JAX, as an Optax transformation."""

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("jax", "optax"):
        raise
    message = f'mechanic.jax needs {error.name}: pip install "mechanic[jax]"'
    raise ModuleNotFoundError(message, name=error.name) from error

from mechanic.jax.freezing import freeze, release
from mechanic.jax.muon import muon, roles
from mechanic.jax.state import MechanicState, learned_rates, nonfinite_steps, scale, scales
from mechanic.jax.transform import mechanize

__all__ = [
    "MechanicState",
    "freeze",
    "learned_rates",
    "mechanize",
    "muon",
    "nonfinite_steps",
    "release",
    "roles",
    "scale",
    "scales",
]
