"""Stop tuning and keep the learned scale: freeze it inside Mechanic, or return to the base optimizer."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from mechanic.jax.refusals import refuse_other_labels
from mechanic.jax.state import MechanicState, PyTree, find, learned_rates_of, replace, warn_unless_last
from mechanic.jax.tuners import rows_of


def freeze(state: PyTree) -> PyTree:
    """Stop tuning: S becomes its mean, see :func:`learned_rates`, and the memory of Delta is freed.

    Go on with the same transformation, whose updates are S times those of the base. The state, which may be any state
    around Mechanic's, has another structure then, so a jitted step compiles once more. NaN and inf reach the base, as
    they would without Mechanic. There is no way back to tuning but a new ``init``.

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
    base: optax.GradientTransformation, state: PyTree, *, labels: PyTree | Callable[[PyTree], PyTree] | None = None
) -> tuple[optax.GradientTransformationExtraArgs, PyTree]:
    """Return to the base optimizer alone, at the learned learning rate: nothing of Mechanic is left.

    With one tuner the result is ``optax.chain(base, optax.scale(S / peak_lr))`` with the mean of S, see
    :func:`learned_rates`, in which the base keeps its moments and its place in the schedule. Put clipping and
    accumulation around it again. Half-precision parameters lose their residuals, so steps below their last bit are lost
    again.

    Args:
        base: what :func:`mechanic.jax.mechanize` was given, or the same with another schedule.
        state: of the transformation until now, or any state around it. It may be frozen.
        labels: those that ``mechanize`` was given.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.jax import learned_rates, mechanize, release
        >>> params = jnp.ones(3)
        >>> optimizer = mechanize(optax.sgd(1.0))
        >>> state = optimizer.init(params)
        >>> for _ in range(2):
        ...     updates, state = jax.jit(optimizer.update)(params, state, params)
        >>> plain, plain_state = release(optax.sgd(1.0), state)
        >>> updates, plain_state = plain.update(params, plain_state, params)
        >>> bool(jnp.allclose(updates, -learned_rates(state)["default"]))
        True
    """
    warn_unless_last(state)
    found = find(state)
    if len(found) != 1:
        raise ValueError(f"this state holds {len(found)} Mechanics; pass the state of the one to release")
    (ours,) = found
    _refuse_unlearned(ours)
    if any(map(jnp.ndim, ours.scale.values())):
        raise ValueError(
            "the state is of several runs, made under vmap, and each has its own S; release them one by one, for "
            "example with jax.tree.map(lambda leaf: leaf[0], state)"
        )
    if not callable(labels):
        refuse_other_labels(ours, rows_of(labels, None).names)

    def at_learned_rates(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
        names, rows = rows_of(labels, updates)
        refuse_other_labels(ours, names)
        leaves = zip(jax.tree.leaves(updates), rows, strict=True)
        rates = {name: learned / ours.peak_lr for name, learned in learned_rates_of(ours).items()}
        scaled = [u * jnp.asarray(rates[names[row]], u.real.dtype) for u, row in leaves]
        return jax.tree.unflatten(jax.tree.structure(updates), scaled)

    return optax.chain(base, optax.stateless(at_learned_rates)), (ours.base, optax.EmptyState())


def _frozen(state: MechanicState) -> MechanicState:
    _refuse_unlearned(state)
    return state._replace(scale=learned_rates_of(state), delta=None, delta_scales=None, tuner=None)


def _refuse_unlearned(state: MechanicState) -> None:
    scales = state.scale.values()
    if any(isinstance(scale, jax.core.Tracer) for scale in scales):
        return  # under jit the values are not known
    if not all((jnp.asarray(scale) > 0).all() for scale in scales):
        raise ValueError(
            f"nothing has been learned yet, the scales are {state.scale}; take some steps first, and use no label of "
            "which nothing is trained"
        )
