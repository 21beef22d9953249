"""What Mechanic remembers between steps, and how to find it inside the state of whatever stands around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mechanic.tuner import TunerState

PyTree = Any


class MechanicState(NamedTuple):
    """The state of :func:`mechanic.jax.mechanize`, a pytree of arrays.

    ``scale`` repeats what the tuner says, so that it can be read by name and survives :func:`mechanic.jax.freeze`.
    ``residual`` is None where no parameter is in half precision, and in it stands None for every parameter that is not.
    """

    scale: dict[str, jax.Array]  # S by tuner
    delta: PyTree | None  # like the parameters, in at least float32; None once frozen
    residual: PyTree | None  # what rounding cut off half-precision parameters
    tuner: TunerState | None  # arrays [tuners, n], rows in the order of the names in scale; None once frozen
    base: PyTree  # the state of the base
    unit: jax.Array  # the learning rate inside the base that counts as 1
    count: jax.Array  # type: ignore[assignment]  # how many updates there were, as Optax's bases count; int32


def scales(state: PyTree) -> dict[str, jax.Array]:
    """S of every tuner by its name: the factor on the base's updates, at a learning rate of ``unit``.

    Args:
        state: of :func:`mechanic.jax.mechanize`, or of anything around it: ``optax.chain``, ``MultiSteps``,
            ``inject_hyperparams``, ``masked``, a whole train state.

    Returns:
        0-dim arrays, so it may be called under ``jit``. Without ``labels`` there is one, named ``"default"``.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from mechanic.jax import mechanize, scales
        >>> optimizer = optax.chain(optax.clip(1.0), mechanize(optax.sgd(1.0)))
        >>> scales(optimizer.init({"w": jnp.ones(3)}))
        {'default': Array(0., dtype=float32)}
    """
    by_name: dict[str, jax.Array] = {}
    for found in find(state):
        if repeated := by_name.keys() & found.scale.keys():
            raise ValueError(
                f"this state holds several Mechanics with a tuner named {sorted(repeated)[0]!r}; "
                "pass the state of one of them, or name their tuners apart with labels="
            )
        by_name |= found.scale
    return by_name


def scale(state: PyTree) -> jax.Array:
    """S where there is one tuner; see :func:`scales`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from mechanic.jax import mechanize, scale
        >>> scale(mechanize(optax.adam(1.0)).init(jnp.ones(3)))
        Array(0., dtype=float32)
    """
    by_name = scales(state)
    if len(by_name) != 1:
        raise ValueError(f"there is not one tuner but {len(by_name)}, {', '.join(by_name)}; call scales() instead")
    return next(iter(by_name.values()))


def find(state: PyTree) -> list[MechanicState]:
    """Every Mechanic inside a state."""
    found = [node for node in jax.tree.leaves(state, is_leaf=_is_ours) if _is_ours(node)]
    if not found:
        raise ValueError(f"found no state of mechanic.jax.mechanize in a {type(state).__name__}")
    return found


def replace(state: PyTree, change: Callable[[MechanicState], MechanicState]) -> PyTree:
    """The state with every Mechanic inside it changed."""
    find(state)  # raises where there is none
    return jax.tree.map(lambda node: change(node) if _is_ours(node) else node, state, is_leaf=_is_ours)


def flatten(tree: PyTree) -> tuple[list[jax.Array], Any]:
    """The leaves and the structure."""
    return jax.tree.flatten(tree)


def _is_ours(node: Any) -> bool:
    return isinstance(node, MechanicState)
