"""Everything about shards: local sums become those of all parameters, with one all-reduce.

All parameters add up to one small array before any device hears of another, so there is one all-reduce whatever the
layout, over the axes along which anything is cut. What several of those shards hold is weighted so that it counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Summing = Callable[..., jax.Array]
"""From arrays, list after list, to their sums as they are here: whole, or one shard of each."""

Weighted = Callable[[Sequence[float] | None], Summing]
"""From a weight for every parameter to the sums."""


def over_shards(
    weighted: Weighted, arrays: Sequence[jax.Array], lists: int, axis_name: Hashable | None = None
) -> jax.Array:
    """The sums over whole arrays, however they are cut.

    Args:
        weighted: makes the function that sums up what one device holds.
        arrays: its arguments, several lists one after the other, each with one array per parameter.
        lists: how many lists.
        axis_name: inside ``shard_map``, the axes over which the parameters are cut.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name is not None:
        return _inside_shard_map(weighted, arrays, lists, axis_name)
    if not mesh.empty and mesh.manual_axes:
        return weighted(None)(*arrays)  # inside shard_map, where every shard holds all parameters
    if not mesh.empty and AxisType.Explicit in mesh.axis_types:
        return _on_explicit_axes(weighted, arrays, lists, mesh)
    return _under_jit(weighted, lists)(*arrays)


def transposed(arrays: Sequence[Any], lists: int) -> list[tuple[Any, ...]]:
    """From one list after the other to one tuple per parameter."""
    n = len(arrays) // lists
    return list(zip(*(arrays[i * n : (i + 1) * n] for i in range(lists)), strict=True))


def _under_jit(weighted: Weighted, lists: int) -> Summing:
    """Where only the compiler knows the layout.

    Left to itself, XLA makes an all-reduce for every way in which some parameter is laid out, or gathers.
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
            with jax.enable_x64(has_float64):  # the compiler calls from a thread of its own
                return added_up(*arrays)

        layout = tuple(NamedSharding(mesh, spec) for spec in specs) * lists  # the other lists as the parameters
        return mesh, lower, NamedSharding(mesh, P()), layout

    def rule(mesh: Mesh, operands: Sequence[Any], results: Sequence[Any]) -> str:
        """In Shardy's notation: the same axes in every list, none of them in the result."""
        params = operands[: len(operands) // lists]
        axes = [" ".join(f"leaf{i}axis{k}" for k in range(len(param.shape))) for i, param in enumerate(params)]
        return f"{', '.join(axes * lists)} -> row column"

    partitioned.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, operands, result: NamedSharding(mesh, P()),
        sharding_rule=rule,
    )

    @summed.def_vmap  # the partitioned form cannot be batched, the sums themselves can
    def batched(axis_size: int, in_batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        axes = [0 if is_batched else None for is_batched in in_batched]
        return jax.vmap(sum_here, in_axes=axes, axis_size=axis_size)(*arrays), True

    return summed


def _on_explicit_axes(weighted: Weighted, arrays: Sequence[jax.Array], lists: int, mesh: Any) -> jax.Array:
    """Where the layout is part of the type."""
    specs = tuple(jax.typeof(array).sharding.spec for array in arrays)
    lower = _added_up(weighted, [_axes_of(*leaf) for leaf in transposed(specs, lists)], mesh.shape)
    return jax.shard_map(lower, in_specs=specs, out_specs=P())(*arrays)


def _inside_shard_map(weighted: Weighted, arrays: Sequence[jax.Array], lists: int, axis_name: Hashable) -> jax.Array:
    """Where JAX tracks along which axes a value varies; without that (``check_vma=False``) along all that are named."""
    named = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not any(_varies_along(jax.lax.axis_index(name)) for name in named):
        return jax.lax.psum(weighted(None)(*arrays), axis_name)
    cut = [{axis for array in leaf for axis in _varies_along(array)} for leaf in transposed(arrays, lists)]
    sizes = {name: jax.lax.axis_size(name) for name in named}
    return _added_up(weighted, [axes & sizes.keys() for axes in cut], sizes)(*arrays)


def _added_up(weighted: Weighted, cut: Sequence[Collection[Any]], sizes: Any) -> Summing:
    """The sums on one device, added up over the axes along which any parameter is cut; ``cut`` has those of each."""
    axes = [axis for axis in sizes if any(axis in own for own in cut)]
    sum_here = weighted([1 / math.prod(sizes[axis] for axis in axes if axis not in own) for own in cut])
    return lambda *arrays: jax.lax.psum(sum_here(*arrays), tuple(axes))


def _even_part(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec without the axes that cut a dimension into unequal shards: XLA pads those, with anything."""
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
