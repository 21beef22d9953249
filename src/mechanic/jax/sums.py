"""The five sums of every tuner. Where parameters are sharded, XLA adds up their shards."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mechanic.jax.shards import axes_of_shards

Leaves = Sequence[jax.Array]


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
    """The sums of :data:`mechanic.tuner.SUMS`, [tuners, 5], and in a sixth column |g|^2 of ``others`` if there are any.

    ``feedback`` is what the tuner learns from, ``others`` the gradients for the base where those are not the feedback.
    Lists have one leaf per parameter in its working dtype, and ``rows`` the row of its tuner.
    """
    lists = [leaves for leaves in (params, feedback, deltas, others) if leaves]
    # In a derivative of the run S counts as a constant: the square roots in the tuner have none at 0.
    leaves = [jax.lax.stop_gradient(leaf) for leaf in zip(*lists, strict=True)]
    axes: tuple[Hashable, ...] = ()
    weights = [1.0] * len(leaves)
    if axis_name is not None:
        sharded = [axes_of_shards(leaf, axis_name) for leaf in leaves]
        axes = tuple(dict.fromkeys(axis for its in sharded for axis in its))
        # Along the other axes a parameter is replicated, and its weight makes up for that.
        weights = [1 / math.prod(jax.lax.axis_size(axis) for axis in axes if axis not in its) for its in sharded]
    sums = _sums(leaves, tuple(weights), tuple(rows), tuners, 6 if others else 5, jnp.dtype(dtype))
    return jax.lax.psum(sums, axes) if axes else sums


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))  # or every sum would be a call of its own outside of jit
def _sums(
    leaves: Sequence[tuple[jax.Array, ...]],
    weights: tuple[float, ...],
    rows: tuple[int, ...],
    tuners: int,
    columns: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """[tuners, columns]."""
    sums = [jnp.zeros(columns, dtype)] * tuners
    for leaf, weight, row in zip(leaves, weights, rows, strict=True):
        products = jnp.stack([jnp.sum(product, dtype=dtype) for product in _products(*leaf)])
        sums[row] += products if weight == 1 else products * weight
    return jnp.stack(sums)


def _products(x: jax.Array, g: jax.Array, delta: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """The products that each column adds up, in the order of SUMS."""
    pairs = [(delta, g), (delta, x), (g, g), (x, x), (delta, delta), *((other, other) for other in others)]
    return [a.real * b.real + a.imag * b.imag if jnp.iscomplexobj(a) else a * b for a, b in pairs]
