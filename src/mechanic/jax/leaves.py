"""The parameters of one step as a list of leaves, each with its value, its residual and the row of its tuner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mechanic.jax.refusals import leaves_like, refuse_other_params, trainable_arrays
from mechanic.jax.rounding import update_towards, value_of
from mechanic.jax.state import MechanicState, PyTree
from mechanic.jax.tuners import rows_of


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Lists have one entry per parameter, in JAX's order of the leaves."""

    params: PyTree  # as they were given
    treedef: Any
    stored: list[jax.Array]
    residuals: list[jax.Array | None]  # None for a parameter that is not in half precision
    values: list[jax.Array]  # stored + residual, in the working dtype
    names: tuple[str, ...]  # of the tuners
    rows: tuple[int, ...]  # of the tuner of each parameter

    @classmethod
    def of(
        cls, params: optax.Params, state: MechanicState, labels: PyTree | Callable[[PyTree], PyTree] | None
    ) -> Leaves:
        """Raises where the parameters cannot be trained, or are not those that the state was made for."""
        params = trainable_arrays(params)
        refuse_other_params(state, params)
        stored, treedef = jax.tree.flatten(params)
        names, rows = rows_of(labels, params)
        residuals = _for_each(treedef, state.residual)
        values = [value_of(p, residual) for p, residual in zip(stored, residuals, strict=True)]
        return cls(params, treedef, stored, residuals, values, names, rows)

    def like(self, tree: PyTree, what: str) -> list[jax.Array]:
        """The leaves of a tree like the parameters, in the working dtypes; errors call one of them ``what``."""
        given = leaves_like(self.params, tree, what)
        return [jnp.asarray(leaf, x.dtype) for leaf, x in zip(given, self.values, strict=True)]

    def tree(self, leaves: Sequence[Any]) -> PyTree:
        """The inverse of :meth:`like`."""
        return self.treedef.unflatten(leaves)

    def stored_delta(self, state: MechanicState) -> list[tuple[jax.Array, jax.Array | None]]:
        """Codes and scales; the codes are Delta itself where there are no scales."""
        codes, scales = (_for_each(self.treedef, tree) for tree in (state.delta, state.delta_scales))
        return list(zip(codes, scales, strict=True))

    def scaled(self, by_tuner: jax.Array, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Every leaf times the factor of its tuner, [tuners], in the leaf's own dtype."""
        factors = [by_tuner[row].astype(x.real.dtype) for x, row in zip(self.values, self.rows, strict=True)]
        return [factor * leaf for factor, leaf in zip(factors, leaves, strict=True)]

    def move(self, steps: Sequence[jax.Array], state: MechanicState) -> tuple[optax.Updates, MechanicState]:
        """The updates that move the values by ``steps``, and the state with the new residuals."""
        if state.residual is None:
            return self.tree(steps), state
        updates: list[jax.Array] = []
        residuals: list[jax.Array | None] = []
        for param, former, value, step in zip(self.stored, self.residuals, self.values, steps, strict=True):
            update, residual = (step, None) if former is None else update_towards(value + step, param)
            updates.append(update)
            residuals.append(residual)
        return self.tree(updates), state._replace(residual=self.tree(residuals))


def _for_each(treedef: Any, tree: PyTree | None) -> list[Any]:
    """One entry per parameter; None where a tree has no leaf for it."""
    return [None] * treedef.num_leaves if tree is None else treedef.flatten_up_to(tree)
