"""Mechanic's state between steps, and how to read it inside the states of transformations around it."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mechanic.tuner import TunerState, learned_rate

PyTree = Any


class MechanicState(NamedTuple):
    """The state of :func:`mechanic.jax.mechanize`, a pytree of arrays that checkpoints like any other.

    Trees are like the parameters, with None where a parameter has no such thing, and None if no parameter has it.
    """

    scale: dict[str, jax.Array]  # S of every tuner by its name, also once frozen
    delta: PyTree | None  # the sum of the base's updates; None once frozen
    residual: PyTree | None  # what rounding cut off half-precision parameters
    tuner: TunerState | None  # arrays [tuners, n] with one row per name in scale; None once frozen
    base: PyTree  # the base's own state
    peak_lr: jax.Array  # that of mechanize at the last update
    count: jax.Array  # type: ignore[assignment]  # of all updates, in int32 as in Optax; a tuple has a method count
    delta_scales: PyTree | None = None  # of a Delta in int8, one for each block, with the axes of the parameter

    def __repr__(self) -> str:
        learned = ", ".join(f"{name}: {value}" for name, value in self.scale.items())
        return f"MechanicState(S = {{{learned}}}, count={self.count}{', frozen' if self.tuner is None else ''})"


def scales(state: PyTree) -> dict[str, jax.Array]:
    """The learned learning rate of every tuner by its name: S, which the base's peak learning rate stands for.

    ``state`` may also be any state around Mechanic's: of ``optax.chain``, ``MultiSteps``, a whole train state. The
    results are 0-dim arrays, also under ``jit``, and 0 until the second step with a gradient. Without ``labels`` there
    is one, named ``"default"``. During a schedule the effective learning rate is S times the schedule over its peak.

    Example:
        >>> import optax
        >>> from mechanic.jax import mechanize, scales
        >>> optimizer = optax.chain(optax.clip(1.0), mechanize(optax.sgd(1.0)))
        >>> scales(optimizer.init({"w": jnp.ones(3)}))
        {'default': Array(0., dtype=float32)}
    """
    warn_unless_last(state)
    return _by_name(state, lambda found: found.scale)


def scale(state: PyTree) -> jax.Array:
    """The learned learning rate, S, where there is one tuner, which is the default; see :func:`scales`::

        log({"lr": 3e-4})              # before: the one you chose
        log({"lr": scale(state)})      # after: the one it has found

    Example:
        >>> import optax
        >>> from mechanic.jax import mechanize, scale
        >>> scale(mechanize(optax.adam(1.0)).init(jnp.ones(3)))
        Array(0., dtype=float32)
    """
    warn_unless_last(state)
    by_name = _by_name(state, lambda found: found.scale)
    if len(by_name) != 1:
        raise ValueError(f"there is not one tuner but {len(by_name)}, {', '.join(by_name)}; call scales() instead")
    return next(iter(by_name.values()))


def learned_rates(state: PyTree) -> dict[str, jax.Array]:
    """The learning rate to train with next time, by tuner: the mean of S, weighted with the schedule.

    The first 50 steps are left out, in which S finds its size; until then this is S. The last S is mostly noise if a
    schedule ends near 0, since such small steps tell little. Without ``schedule=`` the mean is not weighted.
    :func:`freeze` and :func:`release` use the mean.

    Example:
        >>> import jax, optax
        >>> from mechanic.jax import learned_rates, mechanize
        >>> optimizer = mechanize(optax.sgd(0.1))
        >>> params = jnp.ones(3)
        >>> state = optimizer.init(params)
        >>> for _ in range(60):
        ...     updates, state = jax.jit(optimizer.update)(params, state, params)
        >>> bool(learned_rates(state)["default"] > 0)
        True
    """
    warn_unless_last(state)
    return _by_name(state, learned_rates_of)


def learned_rates_of(found: MechanicState) -> dict[str, jax.Array]:
    if found.tuner is None:  # frozen
        return found.scale
    means = learned_rate(with_all_fields(found.tuner), jnp)
    return {name: means[..., row] for row, name in enumerate(sorted(found.scale))}


def with_all_fields(tuner: TunerState) -> TunerState:
    """A tuner that may have been pickled before it had sums for the learned rate: their defaults are numbers."""
    scales = tuner.scales
    return TunerState(*(jnp.broadcast_to(jnp.asarray(field, scales.dtype), scales.shape) for field in tuner))


def nonfinite_steps(state: PyTree) -> dict[str, jax.Array]:
    """How many steps had NaN or inf in the gradients or sums of a tuner, by its name; see :func:`scales`.

    On such a step S stays as it was, and the base gets zeros. If S stays 0, look here: all gradients may be NaN. A
    frozen state does not count them.

    Example:
        >>> import jax, optax
        >>> from mechanic.jax import mechanize, nonfinite_steps
        >>> optimizer = mechanize(optax.sgd(1.0))
        >>> params = jnp.ones(3)
        >>> state = optimizer.init(params)
        >>> for gradient in (1.0, jnp.nan, 1.0):
        ...     updates, state = jax.jit(optimizer.update)(jnp.full(3, gradient), state, params)
        >>> nonfinite_steps(state)
        {'default': Array(1, dtype=int32)}
    """
    warn_unless_last(state)
    return _by_name(state, _nonfinite_steps_of)


def _nonfinite_steps_of(found: MechanicState) -> dict[str, jax.Array]:
    if found.tuner is None:
        return {}
    counts = found.tuner.nonfinite_steps.astype(jnp.int32)  # [..., tuners, n], the same in all n columns
    return {name: counts[..., row, 0] for row, name in enumerate(sorted(found.scale))}


def _by_name(state: PyTree, read: Callable[[MechanicState], dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """One dict of what ``read`` gives for every Mechanic inside a state."""
    by_name: dict[str, jax.Array] = {}
    for found in find(state):
        if repeated := by_name.keys() & found.scale.keys():
            raise ValueError(
                f"this state holds several Mechanics with a tuner named {sorted(repeated)[0]!r}; "
                "pass the state of one of them, or name their tuners apart with labels="
            )
        by_name |= read(found)
    # Flax nnx keeps its own variables in the state of an optimizer.
    return {name: jnp.asarray(value) if hasattr(value, "__jax_array__") else value for name, value in by_name.items()}


def warn_unless_last(state: PyTree) -> None:
    """Warn where the state shows that another transformation comes after Mechanic in ``optax.chain``.

    Every public function calls this directly, so that ``stacklevel=3`` is the user's line.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: _is_ours(node) or _has_others_after_ours(node))
    if any(map(_has_others_after_ours, nodes)):
        warnings.warn(
            "another transformation follows mechanize in optax.chain and changes its updates. Make mechanize the last "
            "element: optax.chain(optax.clip_by_global_norm(1.0), mechanize(base)). "
            "(If this is a tuple of states of several optimizers, pass one of them.)",
            UserWarning,
            stacklevel=3,
        )


def _has_others_after_ours(node: Any) -> bool:
    """Whether it looks like the state of a chain, with a state of Optax's after one that holds ours."""
    if type(node) not in (tuple, OrderedDict):
        return False
    parts = list(node.values() if isinstance(node, OrderedDict) else node)
    ours = [any(map(_is_ours, jax.tree.leaves(part, is_leaf=_is_ours))) for part in parts]
    after = parts[ours.index(True) + 1 :] if any(ours) else []
    is_chain = all(isinstance(part, tuple) for part in parts)
    return is_chain and any(type(part).__module__.split(".")[0] == "optax" for part in after)


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


def _is_ours(node: Any) -> bool:
    return isinstance(node, MechanicState)
