"""Refuse arguments that cannot work before anything is computed. Errors name the parameter and the remedy."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mechanic.config import TunerConfig
from mechanic.jax.rounding import is_half_precision
from mechanic.jax.state import MechanicState, PyTree

_LEAVE_OUT = "optax.selective_transform(mechanize(base), freeze_mask=mask)"


def refuse_other_labels(state: MechanicState, names: Collection[str]) -> None:
    """Raise where the state was made with other labels."""
    if set(state.scale) != set(names):
        raise ValueError(
            f"the state has tuners named {sorted(state.scale)}, the labels name {sorted(names)}; "
            "pass the labels that the state was made with"
        )


def refuse_other_betas(state: MechanicState, config: TunerConfig) -> None:
    """Raise where the state was made with more or fewer betas. Unchecked, arrays of one column would broadcast."""
    if state.tuner is not None and state.tuner.scales.shape[-1] != len(config.betas):
        raise ValueError(
            f"the state has {state.tuner.scales.shape[-1]} scales per tuner, the config {len(config.betas)} betas; "
            "pass the betas that the state was made with"
        )


def refuse_other_params(state: MechanicState, params: PyTree) -> None:
    """Raise where the state was made for parameters with other names or shapes, or in another precision."""
    again = "state = optimizer.init(params) makes one for these, and tunes from the start"
    if not isinstance(state, MechanicState):
        raise TypeError(f"got the state of another transformation, a {type(state).__name__}; {again}")
    halves = jax.tree.map(lambda p: p if is_half_precision(p.dtype) else None, params)
    is_frozen = state.delta is None
    before = _described(state.residual if is_frozen else state.delta, state.residual)
    now = _described(halves if is_frozen else params, halves)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            was, is_now = (names.get(name, "not there") for names in (before, now))
            raise ValueError(f"the state was made for other parameters: {name} was {was}, and is {is_now}; {again}")
    treedefs: list[Any] = [jax.tree.structure(tree) for tree in (state.delta, params)]
    if not is_frozen and treedefs[0] != treedefs[1]:
        raise ValueError(f"the state was made for other parameters: their containers are of other types; {again}")


def trainable_arrays(params: PyTree) -> PyTree:
    """The parameters as JAX arrays.

    Raises where one is none, or an integer or a float of 8 bits or fewer: small steps cannot be added to it.
    """

    def as_array(path: Any, leaf: Any) -> jax.Array:
        try:
            array = jnp.asarray(leaf)
        except TypeError:
            raise TypeError(
                f"{_name(path)} is a {type(leaf).__name__}, not an array; pass the trained arrays alone, with Equinox "
                "eqx.filter(model, eqx.is_inexact_array)"
            ) from None
        if not jnp.issubdtype(array.dtype, jnp.inexact) or jnp.finfo(array.dtype).bits < 16:
            raise TypeError(
                f"mechanize moves floating-point parameters of at least 16 bits, but {_name(path)} is {array.dtype}; "
                f"leave it out, for instance with {_LEAVE_OUT}"
            )
        return array

    return jax.tree.map_with_path(as_array, params)


def leaves_like(params: PyTree, tree: PyTree, what: str) -> list[Any]:
    """The leaves of a tree that must have the parameters' structure and shapes; errors call one of them ``what``.

    What ``optax.masked`` hides of the parameters is left out: it does not hide it of extra arguments (Optax 0.2.8).
    """
    treedef: Any = jax.tree.structure(params, is_leaf=_is_masked)
    try:
        given = treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"the {what}s must be a tree like the parameters: {error}") from None
    fitting = []
    for (path, param), leaf in zip(jax.tree.leaves_with_path(params, is_leaf=_is_masked), given, strict=True):
        if _is_masked(param):
            continue
        name = f"the {what} of {_name(path)}"
        if leaf is None:
            raise ValueError(f"{name} is None; pass zeros, or leave the parameter out with {_LEAVE_OUT}")
        if not jax.tree_util.all_leaves([leaf]):
            raise TypeError(f"{name} is a {type(leaf).__name__}, the parameter an array")
        if jnp.shape(leaf) != param.shape:
            raise ValueError(f"{name} has shape {jnp.shape(leaf)}, the parameter {param.shape}")
        fitting.append(leaf)
    return fitting


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _described(tree: PyTree, halves: PyTree) -> dict[str, str]:
    """The shapes of the leaves by their names, and which of them are in half precision."""
    in_half = {_name(path) for path, _ in jax.tree.leaves_with_path(halves)}
    named = {_name(path): str(jnp.shape(leaf)) for path, leaf in jax.tree.leaves_with_path(tree)}
    return {name: f"{shape} in half precision" if name in in_half else shape for name, shape in named.items()}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "the parameter"
