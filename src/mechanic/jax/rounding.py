"""Half-precision parameters: a residual keeps what rounding cuts off, so that small steps add up.

``optax.apply_updates`` adds an update to the parameter and rounds, so a step below half of the parameter's last bit is
lost. Here the value of a parameter is the stored number plus a residual in Mechanic's state. The update moves the
stored number to the rounded new value, and the residual takes the rest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

RESIDUAL_DTYPE = jnp.bfloat16
"""Two bytes with the range of float32: eight more bits below the last one of a half-precision parameter."""


def working_dtype(dtype: DTypeLike) -> jnp.dtype:
    """At least float32, for Delta and the base's parameters: half precision cannot hold a sum of many small steps."""
    return jnp.promote_types(dtype, jnp.float32)


def is_half_precision(dtype: DTypeLike) -> bool:
    return working_dtype(dtype) != dtype


def widen(array: jax.Array) -> jax.Array:
    """The array in its working dtype."""
    return jnp.asarray(array, working_dtype(array.dtype))


def value_of(param: jax.Array, residual: jax.Array | None) -> jax.Array:
    """The stored number plus the residual, in the working dtype."""
    if residual is None:
        return widen(param)
    stored = _rounded(widen(param), param.dtype)
    value = stored + widen(residual)
    # A sum that does not round to the stored number: the parameter was written to since, and the residual is stale.
    return jnp.where(_rounded(value, param.dtype) == stored, value, stored)


def update_towards(value: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The update that moves a half-precision parameter to a value, in the parameter's dtype, and the new residual.

    A step to less than half of the parameter, or to more than twice, may need more digits than its dtype has. Then the
    parameter lands a last bit or two beside the value, and the residual is too large: ``value_of`` will drop it.
    """
    stored = _rounded(widen(param), param.dtype)
    # To the rounded value, not to the value: rounding first the difference and then the sum could miss it.
    update = _rounded(_rounded(value, param.dtype) - stored, param.dtype)
    landed = _rounded(stored + update, param.dtype)
    rest = _rounded(value - landed, RESIDUAL_DTYPE)
    # A residual that was rounded up to half of the parameter's last bit would look stale in value_of: shrink it.
    ambiguous = _rounded(landed + rest, param.dtype) != landed
    rest = jnp.where(ambiguous, rest * (1 - float(jnp.finfo(RESIDUAL_DTYPE).eps)), rest)
    return update.astype(param.dtype), rest.astype(RESIDUAL_DTYPE)


def _rounded(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounded to the precision of another dtype, in its own dtype.

    Without the barrier XLA may remove the pair of conversions ("excess precision"), and every residual would be zero:
    https://github.com/jax-ml/jax/issues/23007. ``lax.reduce_precision`` is made for this, but turns float16's
    subnormals into zeros (seen in jax 0.10.2 on CPU, where the conversions keep them).
    """
    return jax.lax.optimization_barrier(array.astype(dtype)).astype(array.dtype)
