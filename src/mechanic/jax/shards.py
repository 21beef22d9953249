"""Sharded parameters: from the sums on one device to those over all, with one all-reduce.

Each device first adds up all of its parameters to one small array. So there is one all-reduce whatever the layout, over
the mesh axes along which any parameter is sharded. A parameter that is replicated along some of them is weighted, so
that it counts once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Summing = Callable[..., jax.Array]
"""From arrays, one list after the other, to the sums over what this device holds of them."""

Weighted = Callable[[Sequence[float] | None], Summing]
"""From a weight for every parameter, or None for 1, to the function that sums."""

CACHED = 64
"""How many optimizers outside of ``jit`` keep their compiled sums."""

SHARD = 1 << 20
"""Where the number of a shard begins in a parameter's number for rounding."""


def over_shards(
    weighted: Weighted, arrays: Sequence[jax.Array], lists: int, axis_name: Hashable | None = None
) -> jax.Array:
    """The sums over whole arrays, however they are sharded.

    Args:
        weighted: makes the function that sums up what one device holds.
        arrays: its arguments, several lists one after the other, each with one array per parameter.
        lists: how many lists.
        axis_name: inside ``shard_map``, the axes over which the parameters are sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name is not None:
        return _inside_shard_map(weighted, arrays, lists, axis_name)
    if not mesh.empty and mesh.manual_axes:
        return weighted(None)(*arrays)  # inside shard_map without axis_name: every device holds all parameters
    if not mesh.empty and AxisType.Explicit in mesh.axis_types:
        return _on_explicit_axes(weighted, arrays, lists, mesh)
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return _under_jit(weighted, lists)(*arrays)
    return _compiled(weighted, lists, jnp.result_type(float))(*arrays)


def transposed(arrays: Sequence[Any], lists: int) -> list[tuple[Any, ...]]:
    """From one list after the other to one tuple per parameter."""
    n = len(arrays) // lists
    return list(zip(*(arrays[i * n : (i + 1) * n] for i in range(lists)), strict=True))


def on_automatic_axes(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Call a function whose results have the axes of its first argument, each of the same size or a smaller one.

    On explicit mesh axes JAX asks how every array on the way is laid out. Here the compiler decides on that, and only
    the layout of the results is told: that of the first argument, without axes that would cut a result unevenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or AxisType.Explicit not in mesh.axis_types:
        return function(*arrays)
    spec = jax.typeof(arrays[0]).sharding.spec
    results = jax.eval_shape(function, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays))
    layout = jax.tree.map(lambda result: _even_part(spec, result.shape, mesh), results)
    return jax.sharding.auto_axes(function, out_sharding=layout)(*arrays)


def number_of_shard(array: jax.Array, axis_name: Hashable | None) -> int | jax.Array:
    """Inside ``shard_map``, a number for each shard, from ``SHARD`` on; what is the same on all shards has 0 on all."""
    if axis_name is None:
        return 0
    named = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    indices = [jax.lax.axis_index(name) for name in named]
    varying = _varies_along(array) if any(_varies_along(index) for index in indices) else named
    number: int | jax.Array = 0
    for name, index in zip(named, indices, strict=True):
        if name in varying:
            number = number * jax.lax.axis_size(name) + index
    return number * SHARD


def _under_jit(weighted: Weighted, lists: int) -> Summing:
    """Under ``jit`` with automatic axes, only the compiler knows the layout.

    Without ``custom_partitioning`` XLA gathers the sharded arrays: with jax 0.10.2, 13 all-gathers for the four
    parameters of ``tests/jax/sharded.py`` over eight devices.
    """
    sum_here = weighted(None)
    partitioned = custom_partitioning(sum_here)
    summed: Any = jax.custom_batching.custom_vmap(partitioned)
    has_float64 = jnp.result_type(float) == jnp.float64

    def partition(mesh: Mesh, operands: Sequence[Any], result: Any) -> tuple[Any, ...]:
        params = operands[: len(operands) // lists]
        specs = [_even_part(param.sharding.spec, param.shape, mesh) for param in params]
        added_up = _added_up(weighted, [_axes_of(spec) for spec in specs], mesh.shape)

        def lower(*arrays: jax.Array) -> jax.Array:
            with jax.enable_x64(has_float64):  # XLA calls this from another thread, which has its own setting
                return added_up(*arrays)

        layout = tuple(NamedSharding(mesh, spec) for spec in specs) * lists  # every list like the parameters
        return mesh, lower, NamedSharding(mesh, P()), layout

    def rule(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> str:
        """In the notation of Shardy, JAX's partitioner: every list has the same axes, the result has none of them."""
        params = operands[: len(operands) // lists]
        axes = [" ".join(f"leaf{i}axis{k}" for k in range(len(param.shape))) for i, param in enumerate(params)]
        return f"{', '.join(axes * lists)} -> row column"

    partitioned.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, operands, result: NamedSharding(mesh, P()),
        sharding_rule=rule,
    )

    # custom_partitioning has no batching rule: https://github.com/jax-ml/jax/pull/25802. The plain sums have.
    @summed.def_vmap
    def batched(axis_size: int, in_batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        axes = [0 if is_batched else None for is_batched in in_batched]
        return jax.vmap(sum_here, in_axes=axes, axis_size=axis_size)(*arrays), True

    return summed


@functools.lru_cache(maxsize=CACHED)
def _compiled(weighted: Weighted, lists: int, dtype: jnp.dtype) -> Summing:
    """For calls outside of ``jit``: without this, each would compile the sums anew. ``dtype`` tells x64 apart."""
    return jax.jit(_under_jit(weighted, lists))


def _on_explicit_axes(weighted: Weighted, arrays: Sequence[jax.Array], lists: int, mesh: Any) -> jax.Array:
    """On explicit mesh axes the layout is part of an array's type."""
    specs = tuple(jax.typeof(array).sharding.spec for array in arrays)
    lower = _added_up(weighted, [_axes_of(*leaf) for leaf in transposed(specs, lists)], mesh.shape)
    return jax.shard_map(lower, in_specs=specs, out_specs=P())(*arrays)


def _inside_shard_map(weighted: Weighted, arrays: Sequence[jax.Array], lists: int, axis_name: Hashable) -> jax.Array:
    """Inside ``shard_map`` JAX tracks along which axes a value varies.

    With ``check_vma=False`` it does not. Then every parameter counts as sharded along all the named axes.
    """
    named = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not any(_varies_along(jax.lax.axis_index(name)) for name in named):
        return jax.lax.psum(weighted(None)(*arrays), axis_name)
    sharded = [{axis for array in leaf for axis in _varies_along(array)} for leaf in transposed(arrays, lists)]
    sizes = {name: jax.lax.axis_size(name) for name in named}
    return _added_up(weighted, [axes & sizes.keys() for axes in sharded], sizes)(*arrays)


def _added_up(weighted: Weighted, sharded: Sequence[Collection[Any]], sizes: Any) -> Summing:
    """The sums of one device, all-reduced over the axes along which any parameter is sharded.

    ``sharded`` has the axes of each parameter. Along the other axes it is replicated, and its weight makes up for that.
    """
    axes = [axis for axis in sizes if any(axis in of_param for of_param in sharded)]
    replicas = [math.prod(sizes[axis] for axis in axes if axis not in of_param) for of_param in sharded]
    sum_here = weighted([1 / count for count in replicas])
    return lambda *arrays: jax.lax.psum(sum_here(*arrays), tuple(axes))


def _even_part(spec: P, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> P:
    """The spec without the axes that would cut a dimension into unequal shards.

    XLA pads such shards, and the padding is not zero (seen in jax 0.10.2).
    """
    return P(
        *(
            entry if size % math.prod(mesh.shape[axis] for axis in _axes_of(P(entry))) == 0 else None
            for entry, size in zip(spec, shape, strict=False)
        )
    )


def _axes_of(*specs: P) -> set[Any]:
    entries = [entry if isinstance(entry, tuple) else (entry,) for spec in specs for entry in spec if entry is not None]
    return {axis for entry in entries for axis in entry}


def _varies_along(array: jax.Array) -> frozenset[Any]:
    kind: Any = jax.typeof(array)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma  # vma until JAX 0.9
