"""Mechanic as an Optax transformation around an Optax transformation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from mechanic.config import TunerConfig
from mechanic.jax.advance import Factors, advance
from mechanic.jax.bases import injected_peak, known_peak, refuse_parts_of_matrices, refuse_unsuitable
from mechanic.jax.leaves import Leaves
from mechanic.jax.refusals import refuse_other_betas, refuse_other_labels, trainable_arrays
from mechanic.jax.rounding import widen
from mechanic.jax.state import MechanicState, PyTree, with_all_fields
from mechanic.jax.storage import decode, name_of_choice, zero_delta, zero_residuals
from mechanic.jax.sums import measure
from mechanic.jax.tuners import rows_of
from mechanic.tuner import SUMS, TunerState, delta_retention, total_scale, update


def mechanize(
    base: optax.GradientTransformation,
    *,
    config: TunerConfig | Mapping[str, Any] | None = None,
    peak_lr: float | jax.Array | None = None,
    schedule: optax.Schedule | None = None,
    labels: PyTree | Callable[[PyTree], PyTree] | None = None,
    axis_name: Hashable | None = None,
    delta: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Tune the learning rate of an Optax optimizer during training.

    Wrap the optimizer, the base, and pass the parameters to ``update``::

        optimizer = optax.adamw(3e-4)                              # before: 3e-4 was found by a sweep
        updates, state = optimizer.update(grads, state)

        optimizer = mechanize(optax.adamw(1.0))                    # after
        updates, state = optimizer.update(grads, state, params)

    The base's updates u add up to Delta, and the parameters stay at x_1 + S Delta, where S is learned from the
    gradients. The updates must reach the parameters unchanged: in ``optax.chain``, ``mechanize`` is last.

    ``update`` takes one more argument, ``observed``: gradients of another batch at the same parameters, for instance a
    held-out one. S is then learned from those, and the base still gets ``grads``. All other arguments go to the base.

    Args:
        base: any transformation whose updates are added to the parameters. Refused at ``init``: those that choose the
            size of their own steps (Prodigy, line searches) or keep iterates of their own (Schedule-Free, Lookahead).
        config: a :class:`mechanic.TunerConfig` or a dict of its fields.
        peak_lr: the learning rate that the base was built with, by which its updates are divided: S is the learning
            rate at the peak. By default it is the peak of ``schedule``, the number in ``optax.inject_hyperparams``, or
            1. Needed only for another constant: ``mechanize(optax.adamw(3e-4), peak_lr=3e-4)``.
        schedule: the schedule inside the base, which Optax does not show. With it, S settles as the learning rate
            falls, and nothing moves at 0. Without it, S goes on moving the parameters at the end of the run.
        labels: a tuner for each part of the parameters: names, as a pytree prefix or a function that returns one, as
            for ``optax.partition``. By default all share one tuner.
        axis_name: inside ``shard_map``, the name of the axis, or a tuple of names, over which the parameters are
            sharded. Not needed under ``jit``.
        delta: what Delta of real parameters is stored in: ``jnp.float32``, ``jnp.bfloat16`` or ``"int8"``, which takes
            1.02 bytes per parameter. By default float32, or the parameter's own dtype if that is wider.

    Returns:
        A transformation whose state is a :class:`mechanic.jax.MechanicState`.

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
    if schedule is not None and not callable(schedule):
        raise TypeError(f"schedule must be the schedule inside the base, a function of the step, got {schedule!r}")
    peak = known_peak(peak_lr, schedule)
    choice = name_of_choice(delta)
    tuner_config = TunerConfig.of(config)
    base = optax.with_extra_args_support(base)

    def init(params: optax.Params) -> MechanicState:
        params = trainable_arrays(params)
        base_state = _without_shared_buffers(base.init(jax.tree.map(widen, params)), params)
        refuse_unsuitable(base_state)
        if axis_name is not None:
            refuse_parts_of_matrices(base_state)
        names = rows_of(labels, params).names
        dtype = jnp.result_type(float)  # float64 where x64 is enabled: 1 - 0.999999 leaves one digit of a float32
        return MechanicState(
            scale={name: jnp.zeros((), dtype) for name in names},
            delta=jax.tree.map(lambda p: zero_delta(p, choice)[0], params),
            delta_scales=jax.tree.map(lambda p: zero_delta(p, choice)[1], params) if choice == "int8" else None,
            residual=zero_residuals(params),
            tuner=TunerState(*(jnp.zeros((len(names), len(tuner_config.betas)), dtype) for _ in TunerState._fields)),
            base=base_state,
            peak_lr=jnp.asarray(injected_peak(base_state) if peak is None else peak, dtype),
            count=jnp.zeros((), jnp.int32),
        )

    def tune(tuner: TunerState, sums: jax.Array, count: jax.Array) -> tuple[TunerState, jax.Array | None]:
        """The tuners after the step, and the share of Delta to keep.

        ``count`` is the base's place in the schedule; steps without feedback count.
        """
        tuner = with_all_fields(tuner)
        betas = jnp.asarray(tuner_config.betas, sums.dtype)
        rate = None if schedule is None else jnp.asarray(schedule(count), sums.dtype)
        tuned = update(tuner, sums[:, : len(SUMS)], betas, tuner_config, jnp, rate)
        return tuned, delta_retention(tuner, tuned, tuner_config, jnp, rate)

    def step_base(
        leaves: Leaves, grads: Sequence[jax.Array], state: MechanicState, extra_args: Mapping[str, Any]
    ) -> tuple[list[jax.Array], PyTree]:
        """The base's update u, divided by the peak learning rate, and its new state."""
        proposed, base_state = base.update(leaves.tree(grads), state.base, leaves.tree(leaves.values), **extra_args)
        divisor = state.peak_lr if peak is None else peak
        return [u / jnp.asarray(divisor, u.dtype) for u in leaves.like(proposed, "base's update")], base_state

    def step(
        updates: optax.Updates,
        state: MechanicState,
        params: optax.Params | None = None,
        *,
        observed: optax.Updates | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MechanicState]:
        """One step of Algorithm 1: measure at x, tune S, let the base step, move x by S' Delta' - S Delta."""
        if params is None:
            raise ValueError("Mechanic needs the parameters: write optimizer.update(grads, state, params)")
        leaves = Leaves.of(params, state, labels)
        grads = leaves.like(updates, "gradient")
        refuse_other_labels(state, leaves.names)
        refuse_other_betas(state, tuner_config)
        scale = jnp.stack([state.scale[name] for name in leaves.names])  # S, [tuners]
        unit = state.peak_lr if peak is None else _as_given(peak, state.peak_lr)
        new_state = state._replace(peak_lr=unit, count=optax.safe_increment(state.count))
        if state.delta is None or state.tuner is None:  # frozen
            u, base_state = step_base(leaves, grads, state, extra_args)
            return leaves.move(leaves.scaled(scale, u), new_state._replace(base=base_state))

        feedback, unobserved = grads, []
        if observed is not None:
            feedback, unobserved = leaves.like(observed, "observed gradient"), grads
        dtype, tuners = state.tuner.scales.dtype, len(leaves.names)
        stored = zip(leaves.stored_delta(state), leaves.values, strict=True)
        delta = [decode(*codes, x.dtype) for codes, x in stored]
        # [tuners, 5], and a sixth column for the gradients where they are not the feedback
        sums = measure(leaves.values, feedback, delta, unobserved, leaves.rows, tuners, dtype, axis_name)
        tuner, retention = tune(state.tuner, sums, state.count)
        new_scale = total_scale(tuner, jnp)  # S', [tuners]

        # NaN and inf would stay in the base's moments for ever, so a tuner with such gradients gives it zeros.
        finite = jnp.isfinite(sums[:, SUMS.index("grad_sq") if observed is None else -1])  # [tuners]
        grads = [jnp.where(finite[row], g, 0) for g, row in zip(grads, leaves.rows, strict=True)]
        u, base_state = step_base(leaves, grads, state, extra_args)

        factors = Factors.between(scale, new_scale, retention)
        steps, new_delta, delta_scales = advance(leaves, state, u, factors, choice, axis_name)
        new_state = new_state._replace(
            scale=dict(zip(leaves.names, new_scale, strict=True)),
            delta=new_delta,
            delta_scales=delta_scales,
            tuner=tuner,
            base=base_state,
        )
        return leaves.move(steps, new_state)

    return optax.GradientTransformationExtraArgs(init, step)


def _as_given(peak_lr: float | jax.Array, in_state: jax.Array) -> jax.Array:
    """``peak_lr`` as an array. The one in the state is read too, though that changes nothing.

    ``jit`` drops arguments that nothing reads, and then does not donate them:
    https://github.com/jax-ml/jax/pull/2936, and so in jax 0.10.2.
    """
    given = jnp.asarray(peak_lr, in_state.dtype)
    return jnp.where(in_state == given, in_state, given)


def _without_shared_buffers(state: PyTree, params: PyTree) -> PyTree:
    """The state with a buffer of its own for every leaf, so that parameters and state can be donated together.

    Some bases keep the parameters themselves, or one array twice, and XLA refuses to be given a buffer twice:
    https://github.com/google-deepmind/optax/pull/1059 is one such case.
    """
    taken = {id(leaf) for leaf in jax.tree.leaves(params)}

    def copied_if_taken(leaf: Any) -> Any:
        if id(leaf) in taken:
            return jnp.copy(leaf)
        taken.add(id(leaf))
        return leaf

    return jax.tree.map(copied_if_taken, state)
