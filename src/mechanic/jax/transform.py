"""Mechanic as an Optax transformation around an Optax transformation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from mechanic.jax.bases import refuse_unsuitable
from mechanic.jax.labels import rows_of
from mechanic.jax.refusals import (
    leaves_like,
    refuse_other_betas,
    refuse_other_labels,
    refuse_other_params,
    refuse_unit,
    refuse_untrainable,
)
from mechanic.jax.rounding import RESIDUAL_DTYPE, is_half_precision, update_towards, value_of, widen, working_dtype
from mechanic.jax.state import MechanicState, PyTree, flatten
from mechanic.jax.sums import measure
from mechanic.tuner import SUMS, TunerConfig, TunerState, kept_share, total_scale, update


def mechanize(
    base: optax.GradientTransformation,
    *,
    config: TunerConfig | Mapping[str, Any] | None = None,
    unit: float | jax.Array = 1.0,
    schedule: optax.Schedule | None = None,
    labels: PyTree | Callable[[PyTree], PyTree] | None = None,
    axis_name: Hashable | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Learn the size of another transformation's updates while training.

    The base proposes updates u; their sum is Delta, and the parameters are kept at x_1 + S Delta, where S is learned
    from the gradients. The base's learning rate is a shape, not a size: ``unit`` is what counts as 1, so only its
    course over time matters. ``update`` needs the parameters, and what it returns is to be added to them as it is: in
    ``optax.chain``, ``mechanize`` stands last, and clipping before it. Where something follows it,
    :func:`mechanic.jax.scales` and the like warn.

    ``update`` takes a further argument, ``observed``: gradients of another batch at the same parameters, say a held-out
    one, for the tuner to learn from in place of those that the base gets. All other arguments are the base's.

    Args:
        base: any transformation whose updates are added to the parameters.
        config: a :class:`mechanic.TunerConfig` or a dict of its fields.
        unit: the learning rate inside the base that counts as 1: its peak, where there is a schedule. It has to be
            positive, which is checked unless it is traced.
        schedule: the one inside the base, where it has one, which nobody sees from outside: S settles as it falls. It
            is called with the number of updates so far, as the base calls it.
        labels: which parameters are tuned apart: a pytree prefix of them with a name at every leaf, or a function
            from the parameters to one, as for ``optax.partition``. Without it all share one tuner.
        axis_name: inside ``shard_map``, the name of the axis, or a tuple of names, over which the parameters are cut.
            Under ``jit`` none is needed, however they are sharded.

    Returns:
        A transformation with a :class:`mechanic.jax.MechanicState`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from mechanic.jax import mechanize, scale
        >>> optimizer = mechanize(optax.adamw(1.0))
        >>> params = jnp.ones(4)
        >>> state = optimizer.init(params)
        >>> @jax.jit
        ... def step(params, state):
        ...     grads = jax.grad(lambda x: jnp.sum((x - 3.0) ** 2))(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> for _ in range(20):
        ...     params, state = step(params, state)
        >>> bool(scale(state) > 0)
        True

    Reference: Cutkosky, Defazio, Mehta, "Mechanic: A Learning Rate Tuner", 2023.
    """
    if not isinstance(base, optax.GradientTransformation):
        raise TypeError(f"mechanize wraps an optax transformation, got {base!r}; write mechanize(optax.adamw(1.0))")
    refuse_unit(unit)
    tuner_config = TunerConfig.of(config)
    base = optax.with_extra_args_support(base)

    def init(params: optax.Params) -> MechanicState:
        params = jax.tree.map(jnp.asarray, params)
        refuse_untrainable(params)
        base_state = _unshared(base.init(jax.tree.map(widen, params)), params)
        refuse_unsuitable(base_state)
        names = rows_of(labels, params).names
        dtype = jnp.result_type(float)  # float64 where it is enabled: 1 - 0.999999 leaves one digit of a float32
        return MechanicState(
            scale={name: jnp.zeros((), dtype) for name in names},
            delta=jax.tree.map(lambda p: _zeros_like(p, working_dtype(p.dtype)), params),
            residual=_fresh_residuals(params),
            tuner=TunerState(*(jnp.zeros((len(names), len(tuner_config.betas)), dtype) for _ in TunerState._fields)),
            base=base_state,
            unit=jnp.asarray(unit, dtype),
            count=jnp.zeros((), jnp.int32),
        )

    def step(
        updates: optax.Updates,
        state: MechanicState,
        params: optax.Params | None = None,
        *,
        observed: optax.Updates | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MechanicState]:
        """Measure, tune, let the base step, and scale what it did."""
        if params is None:
            raise ValueError("Mechanic needs the parameters: write optimizer.update(grads, state, params)")
        params = jax.tree.map(jnp.asarray, params)
        refuse_untrainable(params)
        refuse_other_params(state, params)
        leaves, treedef = flatten(params)
        names, rows = rows_of(labels, params)
        residuals = _residuals_like(leaves, state.residual)
        values = [value_of(p, residual) for p, residual in zip(leaves, residuals, strict=True)]

        def like_values(tree: PyTree, what: str) -> list[jax.Array]:
            """The leaves of a tree like the parameters, in their working dtypes."""
            return [jnp.asarray(g, x.dtype) for g, x in zip(leaves_like(params, tree, what), values, strict=True)]

        def per_leaf(by_tuner: jax.Array) -> list[jax.Array]:
            """Of every parameter its tuner's own, in a dtype that does not widen what it is multiplied with."""
            return [by_tuner[row].astype(x.real.dtype) for x, row in zip(values, rows, strict=True)]

        def step_base(grads: list[jax.Array]) -> tuple[list[jax.Array], PyTree]:
            """The base's updates, in units of the tuner."""
            proposed, base_state = base.update(
                treedef.unflatten(grads), state.base, treedef.unflatten(values), **extra_args
            )
            return [u / jnp.asarray(unit, u.dtype) for u in like_values(proposed, "base's update")], base_state

        def move(steps: list[jax.Array], new_state: MechanicState) -> tuple[optax.Updates, MechanicState]:
            """The updates that move the parameters by these steps, and the state with what rounding cuts off."""
            if state.residual is None:
                return treedef.unflatten(steps), new_state
            landings = [_land(*each) for each in zip(leaves, residuals, values, steps, strict=True)]
            residual = treedef.unflatten([residual for _, residual in landings])
            return treedef.unflatten([update for update, _ in landings]), new_state._replace(residual=residual)

        grads = like_values(updates, "gradient")
        refuse_other_labels(state, names)
        refuse_other_betas(state, tuner_config)
        scale = jnp.stack([state.scale[name] for name in names])  # S, [tuners]
        count = optax.safe_increment(state.count)
        given_unit = jnp.asarray(unit, state.unit.dtype)
        # The same number, but the former one is read: an argument of a jitted step that nobody reads is not donated.
        own_unit = jnp.where(state.unit == given_unit, state.unit, given_unit)
        if state.delta is None or state.tuner is None:  # frozen
            proposed, base_state = step_base(grads)
            steps = [S * u for S, u in zip(per_leaf(scale), proposed, strict=True)]
            return move(steps, state._replace(base=base_state, unit=own_unit, count=count))

        # Measured at x_t: S' is known before the base steps.
        deltas, dtype = treedef.flatten_up_to(state.delta), state.tuner.scales.dtype
        feedback, unobserved = grads, []
        if observed is not None:
            feedback, unobserved = like_values(_masked_like(params, observed), "observed gradient"), grads
        # [tuners, 5], and a column for the gradients where they are not the feedback
        sums = measure(values, feedback, deltas, unobserved, rows, len(names), dtype, axis_name)
        betas = jnp.asarray(tuner_config.betas, dtype)
        rate = None
        if schedule is not None:  # at the same count as in the base, which also counts steps without feedback
            rate = jnp.asarray(schedule(state.count), dtype)
        tuner = update(state.tuner, sums[:, : len(SUMS)], betas, tuner_config, jnp, rate)
        new_scale = total_scale(tuner, jnp)  # S', [tuners]

        # Gradients that are not finite would stay in the base's moments for ever.
        finite = jnp.isfinite(sums[:, SUMS.index("grad_sq") if observed is None else -1])  # [tuners]
        proposed, base_state = step_base([jnp.where(finite[row], g, 0) for g, row in zip(grads, rows, strict=True)])

        former, kept = scale, kept_share(state.tuner, tuner, tuner_config, jnp)
        if kept is not None:
            deltas = [share * delta for share, delta in zip(per_leaf(kept), deltas, strict=True)]
            former = scale / kept  # S Delta of what is left of Delta
        new_deltas = [delta + u for delta, u in zip(deltas, proposed, strict=True)]
        # S' Delta' - S Delta, from u and Delta' alone: for Delta as well XLA would have to copy what is donated.
        steps = [
            change * new + S * u
            for change, new, S, u in zip(
                per_leaf(new_scale - former), new_deltas, per_leaf(former), proposed, strict=True
            )
        ]
        new_state = MechanicState(
            scale=dict(zip(names, new_scale, strict=True)),
            delta=treedef.unflatten(new_deltas),
            residual=state.residual,
            tuner=tuner,
            base=base_state,
            unit=own_unit,
            count=count,
        )
        return move(steps, new_state)

    return optax.GradientTransformationExtraArgs(init, step)


def _masked_like(params: PyTree, observed: PyTree) -> PyTree:
    """Without what ``optax.masked`` hides of the parameters: it passes further arguments on as they are."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    if not any(is_masked(node) for node in jax.tree.leaves(params, is_leaf=is_masked)):
        return observed
    return jax.tree.map(lambda p, leaf: p if is_masked(p) else leaf, params, observed, is_leaf=is_masked)


def _zeros_like(param: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A buffer of its own, so that both can be donated; laid out like the parameter also where ``init`` is jitted."""
    # Computed from the parameter, for the compiler gives a constant no layout; 0 also where the parameter is NaN.
    return jnp.logical_and(param == param, param != param).astype(dtype)


def _unshared(state: PyTree, params: PyTree) -> PyTree:
    """The state with a buffer of its own for every leaf: some bases keep the parameters, or one array twice."""
    taken = {id(leaf) for leaf in jax.tree.leaves(params)}

    def own(leaf: Any) -> Any:
        if id(leaf) in taken:
            return jnp.copy(leaf)
        taken.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)


def _fresh_residuals(params: PyTree) -> PyTree | None:
    residuals = jax.tree.map(lambda p: _zeros_like(p, RESIDUAL_DTYPE) if is_half_precision(p.dtype) else None, params)
    return residuals if jax.tree.leaves(residuals) else None


def _residuals_like(leaves: list[jax.Array], residual: PyTree | None) -> list[jax.Array | None]:
    """One residual per parameter, None where it has none."""
    if residual is None:
        return [None] * len(leaves)
    waiting = iter(jax.tree.leaves(residual))
    return [next(waiting) if is_half_precision(p.dtype) else None for p in leaves]


def _land(
    param: jax.Array, residual: jax.Array | None, value: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    return (step, None) if residual is None else update_towards(value + step, param)
