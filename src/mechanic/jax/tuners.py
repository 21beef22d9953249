"""Which parameter belongs to which tuner."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

PyTree = Any
DEFAULT = "default"


class Rows(NamedTuple):
    """The tuners' names, and the row of its tuner for every parameter, in the order of the leaves."""

    names: tuple[str, ...]
    of_leaves: tuple[int, ...]


def rows_of(labels: PyTree, params: PyTree) -> Rows:
    """Read ``labels`` as :func:`optax.partition` does: a prefix of the parameters, or a function that returns one.

    Example:
        >>> params = {"body": [1.0, 2.0], "head": 3.0}
        >>> rows_of({"body": "slow", "head": "fast"}, params)
        Rows(names=('fast', 'slow'), of_leaves=(1, 1, 0))
        >>> rows_of(None, params)
        Rows(names=('default',), of_leaves=(0, 0, 0))
    """
    if labels is None:
        return Rows((DEFAULT,), (0,) * len(jax.tree.leaves(params)))
    prefix = labels(params) if callable(labels) else labels
    names = tuple(sorted({str(label) for label in jax.tree.leaves(prefix)}))  # as JAX sorts S, a dict by name
    if not jax.tree.leaves(params):
        return Rows(names, ())  # optax.tree.map_params calls init with a placeholder that has no leaves
    try:
        spread = jax.tree.map(lambda label, below: jax.tree.map(lambda _: str(label), below), prefix, params)
    except ValueError:
        labelled = [path for path, _ in jax.tree.leaves_with_path(prefix)]
        paths = [path for path, _ in jax.tree.leaves_with_path(params)]
        unnamed = [path for path in paths if not any(path[: len(start)] == start for start in labelled)]
        problem = (
            f"have none for {jax.tree_util.keystr(unnamed[0])}" if unnamed else "name something that is not a parameter"
        )
        raise ValueError(
            "labels must have a name for every part of the parameters, or be a function that returns such a tree; "
            f"these {problem}"
        ) from None
    return Rows(names, tuple(names.index(label) for label in jax.tree.leaves(spread)))
