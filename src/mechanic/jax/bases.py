"""Which transformations cannot be wrapped, and why.

A base is recognised by the states it keeps, wherever they are inside its own.
"""

from __future__ import annotations

from typing import Any

import jax
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
    optax.LookaheadState,
    *(getattr(optax.contrib, name) for name in ("MadgradState",) if hasattr(optax.contrib, name)),  # from 0.2.7 on
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


def _nodes_of(kinds: tuple[type, ...], tree: Any) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return [node for node in nodes if isinstance(node, kinds)]
