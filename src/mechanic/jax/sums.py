"""The five sums of every tuner: one pass over the parameters, and one all-reduce where they are sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

Leaves = Sequence[jax.Array]
AxisName = Hashable
Summing = Callable[..., jax.Array]
Weighted = Callable[..., Summing]

ROW = 256
"""In elements. XLA on CPU adds up a reduction with several results one by one: 10 million float32 at once lose 1.6 %,
rows of this length, whose sums are added up by a reduction with one result, 1e-7."""


def measure(
    params: Leaves,
    feedback: Leaves,
    deltas: Leaves,
    others: Leaves,
    rows: Sequence[int],
    tuners: int,
    dtype: DTypeLike,
    axis_name: AxisName | None,
) -> jax.Array:
    """The sums of :data:`mechanic.tuner.SUMS`, and, where there are others, the square norm of those.

    Args:
        params: in their working dtype, as all that follow; one leaf per parameter.
        feedback: the gradients that the tuner is to see.
        deltas: Delta.
        others: further gradients whose norm is needed, or none.
        rows: of every leaf, the row of its tuner.
        tuners: how many rows there are.
        dtype: of the result.
        axis_name: of ``shard_map``, over which the parameters are cut.

    Returns:
        [tuners, 5], or [tuners, 6] with others.
    """
    columns = 6 if others else 5
    if not params:
        return jnp.zeros((tuners, columns), dtype)
    lists = [leaves for leaves in (params, feedback, deltas, others) if leaves]
    # Where a run is differentiated, S counts as given: what it is made of has no derivative at its start.
    arrays = [jax.lax.stop_gradient(array) for leaves in lists for array in leaves]

    def weighted(weights: Sequence[float] | None = None) -> Summing:
        """The sums over arrays as they are here, whole or one shard of each."""
        return lambda *arrays: _sum_up(_transposed(arrays, len(lists)), rows, tuners, dtype, weights)

    mesh = jax.sharding.get_abstract_mesh()
    if axis_name is not None:
        weights = _weights_in_manual(arrays, len(lists), axis_name)
        return jax.lax.psum(weighted(weights)(*arrays), axis_name)
    if not mesh.empty and mesh.manual_axes:
        return weighted()(*arrays)  # inside shard_map, where every shard holds all parameters
    if not mesh.empty and AxisType.Explicit in mesh.axis_types:
        return _over_explicit_shards(weighted, arrays, len(lists))
    return _over_shards(weighted, len(lists))(*arrays)


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
    whole = size - size % row
    in_rows = _reduce(_products(*(array[:whole].reshape(-1, row) for array in flat)), axis=1)
    sums = jnp.stack([jnp.sum(sums_of_rows, dtype=dtype) for sums_of_rows in in_rows])
    if whole < size:
        sums += jnp.stack(_reduce(_products(*(array[whole:] for array in flat)), axis=0)).astype(dtype)
    return sums


def _row_length(size: int) -> int:
    """Near ROW, and without a remainder where possible."""
    return next((length for length in range(4 * ROW, ROW // 4, -1) if size % length == 0), ROW)


def _products(x: jax.Array, g: jax.Array, delta: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """What the columns add up, in the order of SUMS."""
    pairs = [(delta, g), (delta, x), (g, g), (x, x), (delta, delta), *((other, other) for other in others)]
    return [_real_product(a, b) for a, b in pairs]


def _real_product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a.real * b.real + a.imag * b.imag if jnp.iscomplexobj(a) else a * b


def _reduce(operands: list[jax.Array], axis: int) -> list[jax.Array]:
    """Sum several arrays along an axis in one loop, where separate sums would each read their operands again."""

    def add(some: Sequence[jax.Array], more: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(a + b for a, b in zip(some, more, strict=True))

    zeros = tuple(jnp.zeros((), operand.dtype) for operand in operands)
    return list(jax.lax.reduce(tuple(operands), zeros, add, (axis,)))


def _transposed(arrays: Sequence[Any], lists: int) -> list[tuple[Any, ...]]:
    """From one list after the other to one tuple per parameter."""
    n = len(arrays) // lists
    return list(zip(*(arrays[i * n : (i + 1) * n] for i in range(lists)), strict=True))


# Shards. All parameters add up to one array before any device hears of another, so that there is one all-reduce
# whatever the layout; what several devices hold is weighted so that it counts once.


def _over_shards(weighted: Weighted, lists: int) -> Summing:
    """Under ``jit``, where only the compiler knows the layout.

    Left to itself, XLA makes an all-reduce for every way in which some parameter is laid out, or gathers.
    """

    sum_here = weighted()
    partitioned = custom_partitioning(sum_here)
    summed: Any = jax.custom_batching.custom_vmap(partitioned)

    def partition(mesh: Mesh, operands: Sequence[Any], result: Any) -> tuple[Any, ...]:
        params = operands[: len(operands) // lists]  # the others are laid out like them
        lower = _sum_of_all(weighted, mesh, [operand.sharding.spec for operand in params])
        return mesh, lower, NamedSharding(mesh, P()), tuple(operand.sharding for operand in params) * lists

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


def _over_explicit_shards(weighted: Weighted, arrays: Leaves, lists: int) -> jax.Array:
    """On a mesh with explicit axes, where the layout is part of the type."""
    mesh = jax.sharding.get_abstract_mesh()
    specs = [jax.typeof(array).sharding.spec for array in arrays]
    lower = _sum_of_all(weighted, mesh, specs[: len(specs) // lists])
    return jax.shard_map(lower, in_specs=tuple(specs), out_specs=P())(*arrays)


def _sum_of_all(weighted: Weighted, mesh: Any, specs: Sequence[P]) -> Summing:
    """The sums on one device, added up over the mesh."""
    weights = [math.prod(mesh.shape[axis] for axis in _axes_of(spec)) / mesh.size for spec in specs]
    sum_here = weighted(weights)
    return lambda *arrays: jax.lax.psum(sum_here(*arrays), mesh.axis_names)


def _axes_of(spec: P) -> list[str]:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return [axis for entry in entries for axis in entry]


def _weights_in_manual(arrays: Leaves, lists: int, axis_name: AxisName) -> list[float] | None:
    """Inside ``shard_map``: one over the number of shards that hold the same; None where JAX does not track that."""
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not any(jax.typeof(jax.lax.axis_index(axis)).vma for axis in axes):
        return None  # pmap, or check_vma=False: every shard counts as different
    varies = [set().union(*(jax.typeof(array).vma for array in leaf)) for leaf in _transposed(arrays, lists)]
    return [1 / math.prod(jax.lax.axis_size(axis) for axis in axes if axis not in over) for over in varies]
