"""Muon for the matrices of a model and AdamW for the rest, as a base; and what each parameter does, by its name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.tree_util import DictKey, GetAttrKey

from mechanic.jax.state import PyTree

ROLES = ("matrix", "experts", "conv", "embedding", "head", "vector", "other")

_HEAD = re.compile(
    r"^((lm_|cls_|mlm_)?head|classifier|score|logits|unembed|embed_out|output_projection|qa_outputs|proj_out)$"
)
_EMBEDDING = re.compile(r"embed|^(pos|position|positions|token|tokens|wte|wpe)$", re.IGNORECASE)
_EXPERTS = re.compile(r"expert|moe", re.IGNORECASE)
_INTO_HEADS = re.compile(r"^(query|key|value|q|k|v)(_proj)?$")  # [features, heads, head_dim], as Flax has them
_OUT_OF_HEADS = re.compile(r"^(out|o)(_proj)?$")  # [heads, head_dim, features]
_VALUES = (GetAttrKey("value"), GetAttrKey("raw_value"))


def roles(params: PyTree, overrides: Mapping[str, str] | None = None) -> PyTree:
    """What each parameter does: matrix, experts, conv, embedding, head or vector, by its name and shape; else other.

    Use it to see what :func:`mechanic.jax.muon` does, or for a tuner per role, ``mechanize(muon(1.0), labels=roles)``.
    JAX knows parameters by names only, not by modules: a head is one if it is called so, as ``lm_head`` or
    ``classifier``; else it counts as a matrix. A matrix of one row or one column is a vector.

    Args:
        params: the parameters.
        overrides: roles by patterns of names where you want others, as ``{"*.last.kernel": "head"}``. The first that
            fits is taken. Write ``functools.partial(roles, overrides=...)`` for ``labels``.

    Returns:
        The roles, as a tree like the parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> from mechanic.jax import roles
        >>> roles({"embed": jnp.ones((9, 4)), "mlp": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}})
        {'embed': 'embedding', 'mlp': {'bias': 'vector', 'kernel': 'matrix'}}
    """
    overrides = dict(overrides or {})
    for pattern, role in overrides.items():
        if role not in ROLES:
            raise ValueError(f"{pattern!r} is given the role {role!r}, which is none of {list(ROLES)}")

    def role_of(path: Any, leaf: Any) -> str:
        name = _name(path)
        fitting = [role for pattern, role in overrides.items() if fnmatchcase(name, pattern)]
        return fitting[0] if fitting else _role_of(name.split("."), jnp.shape(leaf))

    return jax.tree_util.tree_map_with_path(role_of, params)


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
    serve both. Kernels of attention with a dimension for heads, as Flax has them, are matrices.

    Args:
        learning_rate: of both; a number or a schedule.
        weight_decay: of both.
        momentum: of Muon.
        nesterov: of Muon.
        ns_steps: of Muon: how often it iterates to make an update orthogonal.
        b1: of AdamW.
        b2: of AdamW.
        eps: of AdamW.
        overrides: as for :func:`mechanic.jax.roles`. Parameters of the role ``other`` are refused by name.

    Example:
        >>> import jax.numpy as jnp
        >>> from mechanic.jax import mechanize, muon
        >>> optimizer = mechanize(muon(1.0))  # doctest: +SKIP
        >>> state = optimizer.init({"hidden": jnp.ones((4, 4)), "bias": jnp.ones(4)})  # doctest: +SKIP
    """
    _require_consistent_rms()
    of_matrices = optax.contrib.muon(
        learning_rate,
        ns_steps=ns_steps,
        beta=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
        muon_weight_dimension_numbers=_dimension_numbers,
        consistent_rms=0.2,  # gives its steps the size of AdamW's
    )
    # Not the AdamW inside optax.contrib.muon, which takes Nesterov's momentum where Muon does.
    of_the_rest = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return optax.partition({"muon": of_matrices, "adamw": of_the_rest}, partial(_optimizers, overrides=overrides))


def _require_consistent_rms() -> None:
    if "consistent_rms" not in inspect.signature(optax.contrib.muon).parameters:
        version = optax.__version__
        raise RuntimeError(f"muon needs the consistent_rms of optax.contrib.muon, from 0.2.7 on; this is {version}")


def _optimizers(params: PyTree, overrides: Mapping[str, str] | None) -> PyTree:
    """Which optimizer takes each parameter. Raises where that is not known."""
    found = roles(params, overrides)
    names = [(_name(path), role) for path, role in jax.tree.leaves_with_path(found)]
    if others := [name for name, role in names if role == "other"]:
        raise ValueError(
            f"what these parameters do is not known: {', '.join(others)}; say it, for example with "
            f"muon(1.0, overrides={{{others[0]!r}: 'vector'}})"
        )
    for path, leaf in jax.tree.leaves_with_path(params):
        name = _name(path)
        if dict(names)[name] == "matrix" and not _is_matrix(name.split("."), jnp.shape(leaf)):
            raise ValueError(f"{name} has {jnp.ndim(leaf)} dimensions, and is no matrix: give it another role")
    unused = [p for p in overrides or () if not any(fnmatchcase(name, p) for name, _ in names)]
    if unused and names:
        raise ValueError(f"no parameter has a name that fits {', '.join(map(repr, sorted(unused)))}")
    return jax.tree.map(lambda role: "muon" if role == "matrix" else "adamw", found)


def _role_of(parts: list[str], shape: tuple[int, ...]) -> str:
    # Biases of attention have a dimension for the heads, and those of stacked layers one for the layers.
    if parts[-1] in ("bias", "scale") or sum(size > 1 for size in shape) < 2:
        return "vector"
    if any(_EMBEDDING.search(part) for part in parts):
        return "embedding"
    if any(_EXPERTS.search(part) for part in parts) and len(shape) == 3:
        return "experts"
    if len(shape) == 2 and any(_HEAD.search(part) for part in parts):
        return "head"
    if _is_matrix(parts, shape):
        return "matrix"
    return "conv" if parts[-1] == "kernel" and len(shape) in (3, 4, 5) else "other"


def _is_matrix(parts: list[str], shape: tuple[int, ...]) -> bool:
    between_heads = any(_INTO_HEADS.search(part) or _OUT_OF_HEADS.search(part) for part in parts)
    return len(shape) == 2 or (len(shape) == 3 and between_heads)


def _dimension_numbers(matrices: PyTree) -> PyTree:
    """Which dimensions of a matrix are its rows and columns; those of attention may have one for the heads."""

    def of_leaf(path: Any, leaf: Any) -> Any:
        if jnp.ndim(leaf) == 2:
            return optax.contrib.MuonDimensionNumbers()
        if any(_INTO_HEADS.search(part) for part in _name(path).split(".")):
            return optax.contrib.MuonDimensionNumbers(0, (1, 2))
        return optax.contrib.MuonDimensionNumbers((0, 1), 2)

    return jax.tree_util.tree_map_with_path(of_leaf, matrices)


def _name(path: Any) -> str:
    """Without the last key of a parameter of Flax nnx: in its states, dicts hold variables, and these a ``value``."""
    is_variable = len(path) > 1 and isinstance(path[-2], DictKey) and path[-1] in _VALUES
    return jax.tree_util.keystr(path[:-1] if is_variable else path, simple=True, separator=".")
