"""The five sums of every tuner, in one pass over the parameters."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mechanic.jax.shards import CACHED, Summing, Weighted, over_shards, transposed

Leaves = Sequence[jax.Array]

ROW = 256
"""In elements. XLA on CPU adds up a reduction with several results one element after the other, and a long float32 sum
loses digits: https://github.com/jax-ml/jax/issues/585. 10 million elements in one reduction were 1.6 % off; in rows of
this length, whose sums are then added up by a reduction with one result, 1e-7."""


def measure(
    params: Leaves,
    feedback: Leaves,
    deltas: Leaves,
    others: Leaves,
    rows: Sequence[int],
    tuners: int,
    dtype: DTypeLike,
    axis_name: Hashable | None,
) -> jax.Array:
    """The sums of :data:`mechanic.tuner.SUMS`, and the square norm of ``others`` if there are any.

    Args:
        params: one leaf per parameter, in its working dtype, as in the next three.
        feedback: the gradients that the tuner learns from.
        deltas: Delta.
        others: the gradients for the base, where those are not the feedback; otherwise empty.
        rows: for every leaf, the row of its tuner.
        tuners: how many rows there are.
        dtype: of the result.
        axis_name: inside ``shard_map``, the axes over which the parameters are sharded.

    Returns:
        [tuners, 5], or [tuners, 6] with others.
    """
    columns = 6 if others else 5
    if not params:
        return jnp.zeros((tuners, columns), dtype)
    lists = [leaves for leaves in (params, feedback, deltas, others) if leaves]
    # In a derivative of the run S counts as a constant: the square roots in the tuner have none at 0.
    arrays = [jax.lax.stop_gradient(array) for leaves in lists for array in leaves]

    weighted = _weighted(len(lists), tuple(rows), tuners, jnp.dtype(dtype))
    return over_shards(weighted, arrays, len(lists), axis_name)


@functools.lru_cache(maxsize=CACHED)
def _weighted(lists: int, rows: tuple[int, ...], tuners: int, dtype: DTypeLike) -> Weighted:
    """One function for the same arguments, so that JAX knows it again."""

    def weighted(weights: Sequence[float] | None = None) -> Summing:
        """The sums over the arrays on this device: whole ones, or one shard of each."""
        return lambda *arrays: _sum_up(transposed(arrays, lists), rows, tuners, dtype, weights)

    return weighted


def _sum_up(
    leaves: Sequence[tuple[jax.Array, ...]],
    rows: Sequence[int],
    tuners: int,
    dtype: DTypeLike,
    weights: Sequence[float] | None,
) -> jax.Array:
    """[tuners, columns]."""
    parts: list[list[jax.Array]] = [[] for _ in range(tuners)]
    for i, (leaf, row) in enumerate(zip(leaves, rows, strict=True)):
        part = _sums_of_leaf(*leaf, dtype=dtype)
        parts[row].append(part if weights is None else part * weights[i])
    columns = len(_products(*leaves[0]))
    return jnp.stack([sum(some, start=jnp.zeros(columns, dtype)) for some in parts])


def _sums_of_leaf(*arrays: jax.Array, dtype: DTypeLike) -> jax.Array:
    """[columns], reading every array once."""
    flat = [array.reshape(-1) for array in arrays]
    size, row = flat[0].size, _row_length(flat[0].size)
    in_rows = size - size % row
    row_sums = _reduce(_products(*(array[:in_rows].reshape(-1, row) for array in flat)), axis=1)
    sums = jnp.stack([jnp.sum(column, dtype=dtype) for column in row_sums])
    if in_rows < size:
        sums += jnp.stack(_reduce(_products(*(array[in_rows:] for array in flat)), axis=0)).astype(dtype)
    return sums


def _row_length(size: int) -> int:
    """A divisor of the size near ROW if there is one, otherwise ROW."""
    return next((length for length in range(4 * ROW, ROW // 4, -1) if size % length == 0), ROW)


def _products(x: jax.Array, g: jax.Array, delta: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """The products that each column adds up, in the order of SUMS."""
    pairs = [(delta, g), (delta, x), (g, g), (x, x), (delta, delta), *((other, other) for other in others)]
    return [_real_product(a, b) for a, b in pairs]


def _real_product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a.real * b.real + a.imag * b.imag if jnp.iscomplexobj(a) else a * b


def _reduce(operands: list[jax.Array], axis: int) -> list[jax.Array]:
    """Sum several arrays along an axis in one loop. Separate sums would each read x, g and Delta again."""

    def add(some: Sequence[jax.Array], more: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(a + b for a, b in zip(some, more, strict=True))

    zeros = tuple(jnp.zeros((), operand.dtype) for operand in operands)
    return list(jax.lax.reduce(tuple(operands), zeros, add, (axis,)))
