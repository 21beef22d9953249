"""Which transformations can be wrapped."""

from __future__ import annotations

from typing import Any

import jax
import optax.contrib

from mechanic.jax.state import MechanicState

_TUNERS = (
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
_WITH_ITERATES = (optax.contrib.ScheduleFreeState, optax.contrib.SAMState, optax.LookaheadState)


def refuse_unsuitable(base_state: Any) -> None:
    """Raise where the state of a base shows that scaling its updates makes no sense."""
    for kinds, why in (
        (_TUNERS, "chooses the size of its own steps; wrap the optimizer whose steps it sizes"),
        (_WITH_ITERATES, "keeps iterates of its own, which Mechanic would move the parameters away from"),
    ):
        for found in _nodes_of(kinds, base_state):
            raise TypeError(f"mechanize cannot wrap a base that holds a {type(found).__name__}: it {why}")


def _nodes_of(kinds: tuple[type, ...], tree: Any) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return [node for node in nodes if isinstance(node, kinds)]
