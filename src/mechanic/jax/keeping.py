"""Keeping what was learned: stop tuning, or hand over to the base alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mechanic.jax.labels import names_of, rows_of
from mechanic.jax.refusals import refuse_other_labels
from mechanic.jax.state import MechanicState, PyTree, find, flatten, replace, warn_unless_last


def freeze(state: PyTree) -> PyTree:
    """Stop tuning: keep S as it is, and drop Delta and its memory.

    From here on ``update`` returns S times what the base proposes, and no longer looks at gradients: those that are not
    finite reach the base. A jitted step compiles once more, since the state has another structure.

    Args:
        state: of :func:`mechanic.jax.mechanize`, or of anything around it.

    Returns:
        The same state with every Mechanic in it frozen, to go on with the same transformation.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.jax import freeze, mechanize
        >>> optimizer = mechanize(optax.sgd(1.0))
        >>> params = jnp.ones(3)
        >>> state = optimizer.init(params)
        >>> for _ in range(2):
        ...     updates, state = jax.jit(optimizer.update)(params, state, params)
        >>> freeze(state).delta is None
        True
    """
    warn_unless_last(state)
    return replace(state, _frozen)


def release(
    base: optax.GradientTransformation,
    state: PyTree,
    *,
    labels: PyTree | Callable[[PyTree], PyTree] | None = None,
) -> tuple[optax.GradientTransformationExtraArgs, PyTree]:
    """Hand over to the base alone, its updates multiplied by what was learned.

    With one tuner this is ``optax.chain(base, optax.scale(S / unit))`` with the base's state as it is; the unit is in
    the state. What stood around Mechanic (clipping, accumulation) is to be put around the result again.

    Args:
        base: what :func:`mechanic.jax.mechanize` was given, or the same with another schedule.
        state: of the former transformation.
        labels: as they were given there; needed where there were any.

    Returns:
        The transformation and its state, which is the base's.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.jax import mechanize, release, scale
        >>> params = jnp.ones(3)
        >>> optimizer = mechanize(optax.sgd(1.0))
        >>> state = optimizer.init(params)
        >>> for _ in range(2):
        ...     updates, state = jax.jit(optimizer.update)(params, state, params)
        >>> plain, plain_state = release(optax.sgd(1.0), state)
        >>> updates, plain_state = plain.update(params, plain_state, params)
        >>> bool(jnp.allclose(updates, -scale(state)))
        True
    """
    warn_unless_last(state)
    ours = find(state)
    if len(ours) != 1:
        raise ValueError(f"this state holds {len(ours)} Mechanics; pass the state of the one to release")
    mechanic = ours[0]
    _refuse_unlearned(mechanic)
    if not callable(labels):
        refuse_other_labels(mechanic, names_of(labels))
    factors = {name: scale / mechanic.unit for name, scale in mechanic.scale.items()}
    inner = optax.with_extra_args_support(base)

    def update(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, PyTree]:
        updates, state = inner.update(updates, state, params, **extra_args)
        leaves, treedef = flatten(updates)
        names, rows = rows_of(labels, updates)
        refuse_other_labels(mechanic, names)
        scaled = [u * jnp.asarray(factors[names[row]], u.real.dtype) for u, row in zip(leaves, rows, strict=True)]
        return treedef.unflatten(scaled), state

    return optax.GradientTransformationExtraArgs(inner.init, update), mechanic.base


def _frozen(state: MechanicState) -> MechanicState:
    _refuse_unlearned(state)
    return state._replace(delta=None, tuner=None)


def _refuse_unlearned(state: MechanicState) -> None:
    scales = state.scale.values()
    if any(isinstance(scale, jax.core.Tracer) for scale in scales):
        return  # under jit nobody can tell
    if not all((jnp.asarray(scale) > 0).all() for scale in scales):
        raise ValueError(f"nothing has been learned yet, the scales are {state.scale}; take some steps first")
