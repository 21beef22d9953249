"""Delta of one parameter in fewer bytes: bfloat16, or int8 with a scale for every block.

The codes are those of ``mechanic.torch``: in int8 a block keeps the magnitude of its largest element, m, and for every
element a code c from -127 to 127 that stands for sign(c) (c / 127)^2 m. Rounding is stochastic and right in the mean;
rounding to nearest would lose for good what a step adds below the last bit.

Codes have the shape of the parameter, and scales its axes. So both can be sharded as it is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mechanic.jax.noise import Noise
from mechanic.jax.rounding import RESIDUAL_DTYPE, is_half_precision, working_dtype
from mechanic.jax.shards import on_automatic_axes

BLOCK = 256
"""Elements that share a scale, at most: 4 bytes in 256 are 1.6 % of the memory."""

_LARGEST_CODE = 127

_SMALLEST_SCALE = 1e-30
"""Below it 1 / scale would overflow. Elements smaller than about 1e-34 become 0 or 6e-35."""

_CHOICES = ("float32", "bfloat16", "int8")


def name_of_choice(delta: Any) -> str | None:
    """The ``delta`` of ``mechanize`` as the name of a dtype. Raises where it is none that Delta can be stored in."""
    try:
        name = None if delta is None else jnp.dtype(delta).name
    except TypeError:
        name = ""
    if name not in (None, *_CHOICES):
        raise ValueError(f"delta must be jnp.float32, jnp.bfloat16 or 'int8', got {delta!r}")
    return name


def dtype_of_delta(dtype: DTypeLike, choice: str | None) -> jnp.dtype:
    """What Delta of a parameter is stored in. That of complex parameters is always in their working dtype."""
    working = working_dtype(dtype)
    if choice is None or jnp.issubdtype(dtype, jnp.complexfloating):
        return working
    chosen = jnp.dtype(choice)
    return chosen if chosen.itemsize < working.itemsize else working


def block_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many elements of every axis a block has: as many of the last one as may be, then of the one before.

    Blocks do not go on from row to row as in ``mechanic.torch``, and all are alike if an axis can be cut so. Then
    shards that hold whole blocks need nothing of each other. On average a block has at least 128 elements. Where 256
    elements fill the axes, these are the blocks of ``mechanic.torch``.

    Example:
        >>> block_of((512, 1024)), block_of((4096, 64)), block_of((300,)), block_of((64, 3, 3, 3))
        ((1, 256), (4, 64), (150,), (8, 3, 3, 3))
    """
    block: list[int] = []
    room = BLOCK
    for size in reversed(shape):
        even = (length for length in range(room, room // 2, -1) if size % length == 0)
        block.insert(0, max(size, 1) if size <= room else next(even, room))
        room //= block[0]
    return tuple(block)


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // of_block) for size, of_block in zip(shape, block_of(shape), strict=True))


def decode(codes: jax.Array, scales: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """Delta in ``dtype``."""
    codes = jnp.asarray(codes)
    found, needed = jnp.shape(scales) if scales is not None else None, scales_shape(codes.shape)
    if found != (needed if codes.dtype == jnp.int8 else None):
        raise ValueError(
            f"the scales of a Delta of shape {codes.shape} in {codes.dtype} have the shape {found}, and int8 needs "
            f"{needed}; inside shard_map every shard has blocks of its own, so call optimizer.init there too"
        )
    if scales is None:
        return codes.astype(dtype)
    return on_automatic_axes(_decode_blocks, codes, jnp.asarray(scales)).astype(dtype)


def encode(values: jax.Array, dtype: DTypeLike, noise: Noise | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Codes and scales: rounded stochastically, or to nearest without ``noise``. In its own dtype it stays as it is.

    Of values that are not finite, int8 keeps the scale of their block so, and the whole block is not finite then. In a
    derivative what is stored counts as a constant, since codes have none.
    """
    if values.dtype == dtype:
        return values, None
    values = jax.lax.stop_gradient(values).astype(jnp.float32)
    if dtype == jnp.int8:
        return on_automatic_axes(_encode_blocks, values, *(noise or ()))
    if dtype == jnp.bfloat16 and noise is not None:
        bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + noise.low_bits(values.shape)
        return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16), None
    return values.astype(dtype), None


def _zeros_like(param: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Zeros in a buffer of their own, sharded like the parameter.

    They are computed from the parameter, since under ``jit`` ``jnp.zeros_like`` does not keep the sharding:
    https://github.com/jax-ml/jax/issues/16080. No number is both equal and unequal to itself, NaN included.
    """
    return jnp.logical_and(param == param, param != param).astype(dtype)


def zero_delta(param: jax.Array, choice: str | None) -> tuple[jax.Array, jax.Array | None]:
    """Codes and scales of a Delta of zeros."""
    return encode(_zeros_like(param, working_dtype(param.dtype)), dtype_of_delta(param.dtype, choice))


def zero_residuals(params: Any) -> Any:
    """For half-precision parameters; None where there are none."""
    residuals = jax.tree.map(lambda p: _zeros_like(p, RESIDUAL_DTYPE) if is_half_precision(p.dtype) else None, params)
    return residuals if jax.tree.leaves(residuals) else None


def _decode_blocks(codes: jax.Array, scales: jax.Array) -> jax.Array:
    root = codes.astype(jnp.float32) * (1 / _LARGEST_CODE)
    return root * jnp.abs(root) * _spread(scales, codes.shape)


def _encode_blocks(values: jax.Array, *noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = _largest(jnp.abs(values))
    divisor = jnp.maximum(largest, _SMALLEST_SCALE)
    squares = jnp.abs(values) * _spread(_LARGEST_CODE**2 / divisor, values.shape)  # of codes that are not whole yet
    # The squares of whole numbers q and q + 1 are 2 q + 1 apart. A square v between them, with a random fraction of
    # this gap added, reaches the upper one with the probability (v - q^2) / (2 q + 1), which makes its mean v.
    whole = jnp.floor(jnp.sqrt(squares))
    if noise:
        squares += (2 * whole + 1) * Noise(*noise).fractions(values.shape)
    else:
        squares += whole + 0.5
    codes = jnp.copysign(jnp.sqrt(squares), values).astype(jnp.int8)  # which cuts off what follows the point
    return codes, jnp.where(largest == 0, largest, divisor)


def _largest(magnitudes: jax.Array) -> jax.Array:
    """Of every block, [blocks along each axis]."""
    shape = magnitudes.shape
    block, blocks = block_of(shape), scales_shape(shape)
    missing = [(0, n * size - whole) for n, size, whole in zip(blocks, block, shape, strict=True)]
    padded = jnp.pad(magnitudes, missing) if any(width for _, width in missing) else magnitudes
    apart = padded.reshape([length for pair in zip(blocks, block, strict=True) for length in pair])
    return jnp.max(apart, tuple(range(1, apart.ndim, 2)), initial=0)


def _spread(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """That of its block for every element."""
    block, blocks = block_of(shape), scales_shape(shape)
    within = tuple(range(1, 2 * len(shape), 2))
    apart = [length for pair in zip(blocks, block, strict=True) for length in pair]
    padded = [n * size for n, size in zip(blocks, block, strict=True)]
    together = jnp.broadcast_to(jnp.expand_dims(scales, within), apart).reshape(padded)
    return together[tuple(slice(size) for size in shape)]
