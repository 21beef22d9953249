"""From Delta to Delta', parameter by parameter: decoded, added to, used to move the parameter, and stored again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mechanic.jax.leaves import Leaves
from mechanic.jax.noise import Noise
from mechanic.jax.shards import number_of_shard
from mechanic.jax.state import MechanicState, PyTree
from mechanic.jax.storage import decode, dtype_of_delta, encode


class Factors(NamedTuple):
    """By tuner, [tuners], or those of one parameter."""

    retention: jax.Array | None  # k, the share of Delta that is kept
    scale: jax.Array  # S / k
    change: jax.Array  # S' - S / k

    @classmethod
    def between(cls, scale: jax.Array, new_scale: jax.Array, retention: jax.Array | None) -> Factors:
        scale = scale if retention is None else scale / retention
        return cls(retention, scale, new_scale - scale)

    def of(self, row: int, dtype: DTypeLike) -> Factors:
        """Those of one tuner, in the dtype of a parameter."""
        return jax.tree.map(lambda by_tuner: by_tuner[row].astype(dtype), self)


def advance(
    leaves: Leaves,
    state: MechanicState,
    u: Sequence[jax.Array],
    factors: Factors,
    choice: str | None,
    axis_name: Hashable | None,
) -> tuple[list[jax.Array], PyTree, PyTree | None]:
    """The steps of the parameters, S' Delta' - S Delta, and codes and scales of Delta' = k Delta + u."""
    steps: list[jax.Array] = []
    codes: list[jax.Array] = []
    scales: list[jax.Array | None] = []
    for number, (stored, each, x) in enumerate(zip(leaves.stored_delta(state), u, leaves.values, strict=True)):
        dtype = dtype_of_delta(x.dtype, choice)
        its_number = jnp.asarray(number + number_of_shard(x, axis_name), jnp.uint32)
        noise = None if dtype == x.dtype else Noise(state.count, its_number)
        of_its_tuner = factors.of(leaves.rows[number], x.real.dtype)
        step, new_codes, new_scales = _move(dtype, *stored, each, of_its_tuner, noise)
        steps.append(step)
        codes.append(new_codes)
        scales.append(new_scales)
    return steps, leaves.tree(codes), leaves.tree(scales) if choice == "int8" else None


@partial(jax.jit, static_argnums=0)  # outside of jit, the branches for int8 would be compiled anew in every step
def _move(dtype: DTypeLike, *arguments: Any) -> Any:
    """The step of one parameter, and Delta' as codes and scales."""
    change = partial(_change, dtype)
    if dtype != jnp.int8:
        return change(*arguments)
    return jax.lax.platform_dependent(*arguments, cpu=partial(_apart, change), default=change)


def _change(
    dtype: DTypeLike,
    codes: jax.Array,
    scales: jax.Array | None,
    u: jax.Array,
    factors: Factors,
    noise: Noise | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    delta = decode(codes, scales, u.dtype)
    if factors.retention is not None:
        delta = factors.retention * delta
    new_delta = delta + u
    # S' Delta' - S Delta = (S' - S) Delta' + S u, of the Delta' that is not yet rounded. Delta is not read again, so
    # Delta' may take its donated buffer.
    step = factors.change * new_delta + factors.scale * u
    return step, *encode(new_delta, dtype, noise)


def _apart(change: Callable[..., Any], *arguments: Any) -> Any:  # the last of them is the noise
    """Call ``change`` in a branch of its own, which is always taken, though XLA does not know.

    XLA on CPU works out Delta' several times, all parameters side by side: 16 temporary bytes per parameter with int8
    in jax 0.10.2, and 6 so. ``lax.optimization_barrier`` does not help, since it is removed too early.
    """
    return jax.lax.cond(arguments[-1].step >= 0, change, lambda *others: change(*others[:-1], None), *arguments)
