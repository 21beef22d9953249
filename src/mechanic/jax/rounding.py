"""Half-precision parameters: what rounding cuts off is kept beside them, so that small steps add up.

``optax.apply_updates`` adds an update to the parameter and rounds. A step below half of the parameter's last bit is
then lost, and all later ones of its size with it. Here the value a parameter stands for is what is stored plus a
residual; the update is chosen for what will be stored, and the residual takes the rest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

RESIDUAL_DTYPE = jnp.bfloat16
"""Two bytes with the range of float32: eight more bits below the last one of a half-precision parameter."""


def working_dtype(dtype: DTypeLike) -> jnp.dtype:
    """At least float32, for Delta and for the values a base steps on: a sum of small steps outgrows half precision."""
    return jnp.promote_types(dtype, jnp.float32)


def is_half_precision(dtype: DTypeLike) -> bool:
    return working_dtype(dtype) != dtype


def widen(array: jax.Array) -> jax.Array:
    """In the working dtype; the array itself where it has it."""
    return jnp.asarray(array, working_dtype(array.dtype))


def value_of(param: jax.Array, residual: jax.Array | None) -> jax.Array:
    """What a parameter stands for, in its working dtype."""
    if residual is None:
        return widen(param)
    stored = _rounded(widen(param), param.dtype)
    value = stored + widen(residual)
    # Where it rounds to something else, somebody has written to the parameter since: then that is the value.
    return jnp.where(_rounded(value, param.dtype) == stored, value, stored)


def update_towards(value: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The update, in the parameter's dtype, that brings a half-precision parameter to a value, and its residual then.

    A step to less than half of the parameter, or more than twice, may need more digits than an update in its dtype
    has. Then the parameter lands a last bit or two beside the value, and the residual, too large, is dropped.
    """
    stored = _rounded(widen(param), param.dtype)
    # Towards where the value rounds to, not the value: rounding the difference and then the sum could miss it.
    update = _rounded(_rounded(value, param.dtype) - stored, param.dtype)
    landed = _rounded(stored + update, param.dtype)
    rest = _rounded(value - landed, RESIDUAL_DTYPE)
    # A residual rounded up to half of the parameter's last bit would pass for somebody's write.
    ambiguous = _rounded(landed + rest, param.dtype) != landed
    rest = jnp.where(ambiguous, rest * (1 - float(jnp.finfo(RESIDUAL_DTYPE).eps)), rest)
    return update.astype(param.dtype), rest.astype(RESIDUAL_DTYPE)


def _rounded(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """To the precision of another dtype, but in its own.

    Without the barrier XLA is free to drop the pair of conversions as needless rounding ("excess precision"), and every
    residual would be zero. ``lax.reduce_precision`` would do, did it not flush float16's subnormals.
    """
    return jax.lax.optimization_barrier(array.astype(dtype)).astype(array.dtype)
