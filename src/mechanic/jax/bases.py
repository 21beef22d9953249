"""What is known of a base: whether it can be wrapped, and the peak of its learning rate.

A base is recognised by the states it keeps, wherever they are inside its own.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib

from mechanic.jax.state import MechanicState

_WITH_OWN_STEP_SIZE = (
    MechanicState,
    optax.contrib.MechanicState,
    optax.contrib.ProdigyState,
    optax.contrib.DAdaptAdamWState,
    optax.contrib.DoGState,
    optax.contrib.DoWGState,
    optax.contrib.COCOBState,
    optax.contrib.MomoState,
    optax.contrib.MomoAdamState,
    optax.ScaleByBacktrackingLinesearchState,
    optax.ScaleByZoomLinesearchState,
)
_WITH_OWN_ITERATES = (
    optax.contrib.ScheduleFreeState,
    optax.contrib.SAMState,
    optax.contrib.MadgradState,
    optax.LookaheadState,
)


def refuse_unsuitable(base_state: Any) -> None:
    """Raise where the base's state shows that its updates cannot be scaled."""
    for kinds, why in (
        (_WITH_OWN_STEP_SIZE, "chooses the size of its own steps; wrap the optimizer whose steps it sizes"),
        (_WITH_OWN_ITERATES, "keeps iterates of its own, which Mechanic would move the parameters away from"),
    ):
        for found in _nodes_of(kinds, base_state):
            raise TypeError(f"mechanize cannot wrap a base that holds a {type(found).__name__}: it {why}")


def refuse_parts_of_matrices(base_state: Any) -> None:
    """Raise where a Muon would step inside ``shard_map``: made orthogonal one by one, parts give another update."""
    if _nodes_of((optax.contrib.MuonState,), base_state):
        raise ValueError(
            "Muon needs whole matrices, and inside shard_map, over axis_name, it sees parts of them; "
            "use jit with sharded arrays, without axis_name"
        )


def known_peak(peak_lr: float | jax.Array | None, schedule: optax.Schedule | None) -> Any:
    """The learning rate that counts as 1, if it is given or can be asked for. Warns if these are not the same."""
    of_schedule: Any = None if schedule is None else _peak_of(schedule)
    if peak_lr is None:
        return of_schedule
    _refuse_peak_lr(peak_lr)
    is_known = of_schedule is not None and not any(isinstance(x, jax.core.Tracer) for x in (peak_lr, of_schedule))
    if is_known and not math.isclose(float(peak_lr), of_schedule, rel_tol=0.01):
        warnings.warn(
            f"the schedule peaks at {of_schedule:g}, and peak_lr is {float(peak_lr):g}, so S is not the learning rate. "
            "Leave peak_lr out, and pass the schedule as the base has it",
            UserWarning,
            stacklevel=3,
        )
    return peak_lr


_COUNTS = np.unique(np.geomspace(1, 1e7, 4096).astype(np.int32)) - 1
"""Steps at which a schedule is asked for its value: every one at first, later one in 250."""


def _peak_of(schedule: optax.Schedule) -> Any:
    """The largest value of a schedule; 1 if it has none above 0. If the schedule is traced, so is its peak."""
    with jax.ensure_compile_time_eval():
        values = jax.vmap(schedule)(jnp.asarray(_COUNTS))
        if isinstance(values, jax.core.Tracer):
            return jnp.max(values)
        highest, last = int(jnp.argmax(values)), len(_COUNTS) - 1
        around = _COUNTS[max(highest - 1, 0)], _COUNTS[min(highest + 1, last)]
        peak = float(jnp.max(jax.vmap(schedule)(jnp.asarray(np.linspace(*around, len(_COUNTS)).astype(np.int32)))))
    return peak if peak > 0 else 1.0


def _refuse_peak_lr(peak_lr: Any) -> None:
    """Raise unless it is one positive, finite number. Of a traced one only the shape is known."""
    if isinstance(peak_lr, jax.core.Tracer):
        is_suitable = peak_lr.shape == ()
    else:
        number = np.asarray(peak_lr)
        is_suitable = number.shape == () and number.dtype.kind in "iuf" and bool(0 < number < np.inf)
    if not is_suitable:
        raise ValueError(f"peak_lr must be a positive learning rate, got {peak_lr}")


def injected_peak(base_state: Any) -> Any:
    """The learning rate that ``optax.inject_hyperparams`` shows; 1 if there is none, or it follows a schedule."""
    injected = _nodes_of((optax.InjectStatefulHyperparamsState,), base_state)
    rates = [node for node in injected if "learning_rate" in node.hyperparams]
    numbers = [node.hyperparams["learning_rate"] for node in rates if "learning_rate" not in node.hyperparams_states]
    if len(numbers) < len(rates) or _nodes_of((optax.ScaleByScheduleState,), base_state):
        warnings.warn(
            "the base has a schedule that mechanize was not given. Pass it, mechanize(base, schedule=schedule): then S "
            "is the learning rate at its peak, and settles as it falls. To leave it out on purpose, pass peak_lr",
            UserWarning,
            stacklevel=3,
        )
    return next(iter(numbers), 1.0)


def _nodes_of(kinds: tuple[type, ...], tree: Any) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return [node for node in nodes if isinstance(node, kinds)]
