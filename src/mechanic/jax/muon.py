"""Muon for the matrices of a model and AdamW for the rest, as a base; and what each parameter does, by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.tree_util import DictKey, GetAttrKey

from mechanic.jax.state import PyTree
from mechanic.roles import HEAD_NAMES, given_roles, role_by_name

_INTO_HEADS = re.compile(r"\b(query|key|value|q|k|v)(_proj)?\b")  # [features, heads, head_dim], as Flax has them
_OUT_OF_HEADS = re.compile(r"\b(out|o)(_proj)?\b")  # [heads, head_dim, features]
_VALUES = (GetAttrKey("value"), GetAttrKey("raw_value"))


def roles(params: PyTree, overrides: Mapping[str, str] | None = None) -> PyTree:
    """What each parameter does: matrix, experts, conv, embedding, head or vector, by its name and shape; else other.

    Use it to see what :func:`mechanic.jax.muon` does, or for a tuner per role, ``mechanize(muon(1.0), labels=roles)``.
    Roles are returned as a tree like the parameters. A matrix of one row or one column is a vector, but in a head.

    Args:
        params: the parameters. A head is one if it is called so, as ``lm_head`` or ``classifier``.
        overrides: roles by patterns of names where you want others, as ``{"*.last.kernel": "head"}``. The first that
            fits is taken, and one that fits no parameter is an error.

    Example:
        >>> import jax.numpy as jnp
        >>> from mechanic.jax import roles
        >>> roles({"embed": jnp.ones((9, 4)), "mlp": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}})
        {'embed': 'embedding', 'mlp': {'bias': 'vector', 'kernel': 'matrix'}}
    """
    return jax.tree.unflatten(jax.tree.structure(params), [role for *_, role in _listed(params, overrides)])


def muon(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.01,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    overrides: Mapping[str, str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """``optax.contrib.muon`` for the matrices of a model and AdamW for all else, to be wrapped by ``mechanize``.

    ``mechanize(muon(1.0))`` trains with no learning rate. The steps of Muon have the size of AdamW's, so one tuner can
    serve both. Kernels of attention with a dimension for heads, as Flax has them, are matrices. ``b1``, ``b2`` and
    ``eps`` are AdamW's. ``overrides`` are those of :func:`mechanic.jax.roles`; the role ``other`` is refused by name.

    Example:
        >>> import jax.numpy as jnp
        >>> from mechanic.jax import mechanize, muon
        >>> state = mechanize(muon(1.0)).init({"hidden": jnp.ones((4, 4)), "bias": jnp.ones(4)})
    """
    of_matrices = optax.contrib.muon(
        learning_rate,
        ns_steps=ns_steps,
        beta=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
        muon_weight_dimension_numbers=partial(jax.tree_util.tree_map_with_path, _dimension_numbers),
        consistent_rms=0.2,  # gives its steps the size of AdamW's
    )
    # Not the AdamW inside optax.contrib.muon, which takes Nesterov's momentum where Muon does.
    of_the_rest = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return optax.partition({"muon": of_matrices, "adamw": of_the_rest}, partial(_optimizers, overrides=overrides))


def _optimizers(params: PyTree, overrides: Mapping[str, str] | None) -> PyTree:
    """Which optimizer takes each parameter. Raises where that is not known."""
    listed = _listed(params, overrides)
    if others := [name for name, _, role in listed if role == "other"]:
        raise ValueError(
            f"what these parameters do is not known: {', '.join(others)}; say it, for example with "
            f"muon(1.0, overrides={{{others[0]!r}: 'vector'}})"
        )
    for name, shape, role in listed:
        if role == "matrix" and not _rows_and_columns(name, shape):
            raise ValueError(f"{name} has {len(shape)} dimensions, and is no matrix: give it another role")
    optimizers = ["muon" if role == "matrix" else "adamw" for *_, role in listed]
    return jax.tree.unflatten(jax.tree.structure(params), optimizers)


def _listed(params: PyTree, overrides: Mapping[str, str] | None) -> list[tuple[str, tuple[int, ...], str]]:
    """The name, shape and role of each parameter."""
    named = [(_name(path), jnp.shape(leaf)) for path, leaf in jax.tree.leaves_with_path(params)]
    given = given_roles([[name] for name, _ in named], overrides)
    return [(name, shape, role or _role_of(name, shape)) for (name, shape), role in zip(named, given, strict=True)]


def _role_of(name: str, shape: tuple[int, ...]) -> str:
    entry = name.rpartition(".")[2]
    if entry in ("bias", "scale"):  # of attention with a dimension for the heads, of stacked layers one for the layers
        return "vector"
    if len(shape) == 2 and HEAD_NAMES.search(name):
        return "head"
    role = role_by_name(name, shape)
    if role != "other":
        return role
    if _rows_and_columns(name, shape):
        return "matrix"
    return "conv" if entry == "kernel" and len(shape) in (3, 4, 5) else "other"


def _rows_and_columns(name: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Which dimensions of a matrix are its rows, and which its columns. Empty for what is no matrix."""
    if len(shape) == 2:
        return 0, 1
    if len(shape) == 3 and _INTO_HEADS.search(name):
        return 0, (1, 2)
    if len(shape) == 3 and _OUT_OF_HEADS.search(name):
        return (0, 1), 2
    return ()


def _dimension_numbers(path: Any, matrix: jax.Array) -> Any:
    return optax.contrib.MuonDimensionNumbers(*_rows_and_columns(_name(path), jnp.shape(matrix)))


def _name(path: Any) -> str:
    """Without the last key of a parameter of Flax nnx: in its states, dicts hold variables, and these a ``value``."""
    is_variable = len(path) > 1 and isinstance(path[-2], DictKey) and path[-1] in _VALUES
    return jax.tree_util.keystr(path[:-1] if is_variable else path, simple=True, separator=".")
