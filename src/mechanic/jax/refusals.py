"""Refuse arguments that cannot work before anything is computed. Errors name the parameter and the remedy."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from mechanic.config import TunerConfig
from mechanic.jax.rounding import is_half_precision
from mechanic.jax.state import MechanicState, PyTree
from mechanic.jax.storage import scales_shape

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


def trainable_arrays(params: PyTree) -> PyTree:
    """The parameters as JAX arrays.

    Raises where one is none, or an integer or a float of 8 bits or fewer: small steps cannot be added to it.
    """

    def as_array(path: Any, leaf: Any) -> jax.Array:
        try:
            return jnp.asarray(leaf)
        except TypeError:
            raise TypeError(
                f"{_name(path)} is a {type(leaf).__name__}, not an array; pass the trained arrays alone, with Equinox "
                "eqx.filter(model, eqx.is_inexact_array)"
            ) from None

    params = jax.tree.map_with_path(as_array, params)
    for path, leaf in jax.tree.leaves_with_path(params):
        is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
        if not is_float or jnp.finfo(leaf.dtype).bits < 16:
            raise TypeError(
                f"mechanize moves floating-point parameters of at least 16 bits, but {_name(path)} is {leaf.dtype}; "
                f"leave it out, for instance with {_LEAVE_OUT}{', or store it in bfloat16' if is_float else ''}"
            )
    return params


def refuse_other_params(state: MechanicState, params: PyTree) -> None:
    """Raise where the state was made for parameters of another structure or of other shapes."""
    again = "state = optimizer.init(params) makes one for these, and tunes from the start"
    if not isinstance(state, MechanicState):
        raise TypeError(f"got the state of another transformation, a {type(state).__name__}; {again}")
    if state.delta is None:
        return  # frozen: there is no Delta to compare with
    treedef: Any = jax.tree.structure(params)
    try:
        deltas = treedef.flatten_up_to(state.delta)
    except ValueError:
        deltas = None
    if deltas is None or not jax.tree_util.all_leaves(deltas):
        given, known = ({_name(path) for path, _ in jax.tree.leaves_with_path(tree)} for tree in (params, state.delta))
        only = [f"{name} is only in the {'parameters' if name in given else 'state'}" for name in sorted(given ^ known)]
        difference = only[0] if only else "their containers are of other types"
        raise ValueError(f"the state was made for other parameters: {difference}; {again}")
    for (path, leaf), delta in zip(jax.tree.leaves_with_path(params), deltas, strict=True):
        if leaf.shape != jnp.shape(delta):
            raise ValueError(
                f"{_name(path)} has shape {leaf.shape}, but it had {jnp.shape(delta)} when the state was made; {again}"
            )


def refuse_other_precision(state: MechanicState, params: PyTree) -> None:
    """Raise where a parameter was cast to half precision, or from it, since the state was made."""
    treedef: Any = jax.tree.structure(params)
    kept = [None] * treedef.num_leaves if state.residual is None else treedef.flatten_up_to(state.residual)
    for (path, leaf), residual in zip(jax.tree.leaves_with_path(params), kept, strict=True):
        if is_half_precision(leaf.dtype) != (residual is not None):
            raise ValueError(
                f"{_name(path)} is {leaf.dtype}, but it was {'not ' if residual is None else ''}in half precision when "
                "the state was made; cast parameters before optimizer.init, not after it"
            )


def refuse_other_blocks(state: MechanicState) -> None:
    """Raise where the scales of a Delta in int8 are missing, or are those of blocks that ``shard_map`` has cut."""
    codes = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(state.delta) if leaf.dtype == jnp.int8]
    scales = jax.tree.leaves(state.delta_scales)
    if len(codes) != len(scales):
        raise ValueError(f"Delta of {len(codes)} parameters is in int8, but the state has scales for {len(scales)}")
    for (path, leaf), found in zip(codes, scales, strict=True):
        expected = scales_shape(leaf.shape)
        if found.shape != expected:
            raise ValueError(
                f"Delta of {_name(path)} has shape {leaf.shape} here and needs scales of shape {expected}, not "
                f"{found.shape}; inside shard_map every shard has blocks of its own, so call optimizer.init there too"
            )


def leaves_like(params: PyTree, tree: PyTree, what: str) -> list[Any]:
    """The leaves of a tree that must have the parameters' structure and shapes; errors call one of them ``what``."""
    treedef: Any = jax.tree.structure(params)
    try:
        given = treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"the {what}s must be a tree like the parameters: {error}") from None
    for (path, param), leaf in zip(jax.tree.leaves_with_path(params), given, strict=True):
        if leaf is None:
            raise ValueError(
                f"the {what} of {_name(path)} is None; pass zeros, or leave the parameter out with {_LEAVE_OUT}"
            )
        if not jax.tree_util.all_leaves([leaf]):
            raise TypeError(f"the {what} of {_name(path)} is a {type(leaf).__name__}, the parameter an array")
        if jnp.shape(leaf) != param.shape:
            raise ValueError(
                f"the {what} of {_name(path)} has shape {jnp.shape(leaf)}, the parameter {param.shape}; "
                "both have to be the same"
            )
    return given


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "the parameter"
