"""Sharded parameters, where XLA has to be told something. Under ``jit`` with automatic axes it finds all by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

SHARD = 1 << 20
"""Where the number of a shard begins in a parameter's number for rounding."""


def on_automatic_axes(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Call a function whose results have the axes of its first argument, each of the same size or a smaller one.

    On explicit mesh axes JAX asks how every array on the way is laid out. Here the compiler decides on that, and only
    the layout of the results is told: that of the first argument, without axes that would cut a result unevenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or AxisType.Explicit not in mesh.axis_types:
        return function(*arrays)

    def size_of(entry: Any) -> int:
        return math.prod(mesh.shape[axis] for axis in ((entry,) if isinstance(entry, str) else entry or ()))

    def layout(result: jax.ShapeDtypeStruct) -> P:
        spec = zip(jax.typeof(arrays[0]).sharding.spec, result.shape, strict=False)
        return P(*(entry if size % size_of(entry) == 0 else None for entry, size in spec))

    results = jax.eval_shape(function, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays))
    return jax.sharding.auto_axes(function, out_sharding=jax.tree.map(layout, results))(*arrays)


def axes_of_shards(arrays: Iterable[jax.Array], axis_name: Hashable) -> tuple[Any, ...]:
    """Inside ``shard_map``, along which of the named axes some of the arrays are sharded.

    JAX tracks along which axes a value varies. With ``check_vma=False`` it does not, and all the named axes count.
    """
    named = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not any(_varies_along(jax.lax.axis_index(name)) for name in named):
        return named
    varying = {axis for array in arrays for axis in _varies_along(array)}
    return tuple(name for name in named if name in varying)


def number_of_shard(array: jax.Array, axis_name: Hashable | None) -> int | jax.Array:
    """Inside ``shard_map``, a number for each shard, from ``SHARD`` on; what is the same on all shards has 0 on all."""
    number: int | jax.Array = 0
    if axis_name is not None:
        for name in axes_of_shards([array], axis_name):
            number = number * jax.lax.axis_size(name) + jax.lax.axis_index(name)
    return number * SHARD


def _varies_along(array: jax.Array) -> frozenset[Any]:
    kind: Any = jax.typeof(array)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma  # vma until JAX 0.9
