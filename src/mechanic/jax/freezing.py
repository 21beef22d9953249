"""Stop tuning and keep the learned scale: freeze it inside Mechanic, or return to the base optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mechanic.jax.refusals import refuse_other_labels
from mechanic.jax.state import MechanicState, PyTree, find, flatten, replace, warn_unless_last
from mechanic.jax.tuners import names_of, rows_of


def freeze(state: PyTree) -> PyTree:
    """Stop tuning: S stays as it is, and the memory of Delta is freed.

    From here on ``update`` returns S times the update of the base optimizer. Go on with the same transformation::

        updates, state = optimizer.update(grads, state, params)    # before: tunes S
        state = freeze(state)
        updates, state = optimizer.update(grads, state, params)    # after: S is constant, no Delta

    The state has another structure now, so a jitted step compiles once more. Gradients are no longer checked: NaN and
    inf reach the base optimizer, as they would without Mechanic. There is no way back to tuning but a new ``init``.

    Args:
        state: of :func:`mechanic.jax.mechanize`, or any state around it (``optax.chain``, a whole train state).

    Returns:
        The same state with every Mechanic in it frozen.

    Raises:
        ValueError: if some S is still 0. Under ``jit`` this cannot be checked.

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
    """Return to the base optimizer alone, at the learned learning rate.

    The base keeps its moments and its place in the schedule. With one tuner the result is
    ``optax.chain(base, optax.scale(S / peak_lr))`` with the base's own state; ``peak_lr`` is read from ``state``::

        optimizer = mechanize(base)                    # before
        optimizer, state = release(base, state)        # after: plain Optax, nothing of Mechanic is left

    Transformations around Mechanic (clipping, accumulation) are not part of the result: put them around it again.
    Half-precision parameters lose their residuals, so steps below their last bit are lost again.

    Args:
        base: the transformation that :func:`mechanic.jax.mechanize` was given, or the same with another schedule.
        state: of the transformation until now. It may be frozen.
        labels: the ones that ``mechanize`` was given. By default None, which is refused where there were any: the
            base's state does not say which parameter had which tuner.

    Returns:
        The transformation and its state.

    Raises:
        ValueError: if some S is still 0, if the labels are others than those of the state, or if the state holds
            several Mechanics.

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
    found = find(state)
    if len(found) != 1:
        raise ValueError(f"this state holds {len(found)} Mechanics; pass the state of the one to release")
    mechanic_state = found[0]
    _refuse_unlearned(mechanic_state)
    if any(jnp.ndim(scale) for scale in mechanic_state.scale.values()):
        raise ValueError(
            "the state is of several runs, made under vmap, and each has its own S; release them one by one, for "
            "example with jax.tree.map(lambda leaf: leaf[0], state)"
        )
    if not callable(labels):
        refuse_other_labels(mechanic_state, names_of(labels))
    factors = {name: scale / mechanic_state.peak_lr for name, scale in mechanic_state.scale.items()}
    base = optax.with_extra_args_support(base)

    def update(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, PyTree]:
        updates, state = base.update(updates, state, params, **extra_args)
        leaves, treedef = flatten(updates)
        names, rows = rows_of(labels, updates)
        refuse_other_labels(mechanic_state, names)
        scaled = [u * jnp.asarray(factors[names[row]], u.real.dtype) for u, row in zip(leaves, rows, strict=True)]
        return treedef.unflatten(scaled), state

    return optax.GradientTransformationExtraArgs(base.init, update), mechanic_state.base


def _frozen(state: MechanicState) -> MechanicState:
    _refuse_unlearned(state)
    return state._replace(delta=None, delta_scales=None, tuner=None)


def _refuse_unlearned(state: MechanicState) -> None:
    scales = state.scale.values()
    if any(isinstance(scale, jax.core.Tracer) for scale in scales):
        return  # under jit the values are not known
    if not all((jnp.asarray(scale) > 0).all() for scale in scales):
        raise ValueError(
            f"nothing has been learned yet, the scales are {state.scale}; take some steps first, and use no label of "
            "which nothing is trained"
        )
