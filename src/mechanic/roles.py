"""What a parameter does in its model, as far as its name and shape tell, and the roles that users give by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

ROLES = {
    "matrix": "2-dim weight of a hidden layer",
    "experts": "several matrices in one tensor, as MoE layers have them",
    "conv": "kernel of a convolution",
    "embedding": "table that is looked up, positions, patches; also where the head is tied to it",
    "head": "2-dim weight of the last layer",
    "vector": "bias, norm, anything with one dimension",
    "other": "nothing of these",
}
"""All roles, and what has them."""

# These are searched in names with dots between their parts, as "blocks.0.fc.weight".
HEAD_NAMES = re.compile(
    r"\b((lm_|cls_|mlm_)?head|classifier|score|logits|unembed|embed_out|output_projection|qa_outputs|proj_out)\b"
)
_TABLES = "pos|positions?|tokens?|wte|wpe"  # a whole part, or a word of the last one: "pos_ffn.weight" is no table
EMBEDDING_NAMES = re.compile(rf"embed|\b({_TABLES})\b|(\b|_)({_TABLES})(\b|_)[^.]*$", re.IGNORECASE)
_EXPERT_NAMES = re.compile(r"expert|moe", re.IGNORECASE)


def is_vector(shape: Sequence[int]) -> bool:
    """Whether it has one dimension at most, not counting those of size 1: a matrix of one row is a vector."""
    return sum(size > 1 for size in shape) < 2


def role_by_name(name: str, shape: Sequence[int]) -> str:
    """The role of a parameter whose layer is not known; ``other`` if its name tells nothing."""
    if is_vector(shape):
        return "vector"
    if "lora_" in name and len(shape) == 2:  # of an embedding, A is a table as well
        return "embedding" if "lora_embedding_A" in name else "matrix"
    if EMBEDDING_NAMES.search(name):
        return "embedding"
    if len(shape) == 3 and _EXPERT_NAMES.search(name):
        return "experts"
    return "other"


def given_roles(parameters: Collection[Collection[str]], overrides: Mapping[str, str] | None) -> list[str | None]:
    """The roles that ``overrides`` gives to parameters: that of the first pattern that fits, or None.

    Args:
        parameters: all names of each.
        overrides: roles by patterns of names. One that fits no parameter is an error, unless there are no parameters.
    """
    overrides = overrides or {}
    for pattern, role in overrides.items():
        if role not in ROLES:
            raise ValueError(f"{pattern!r} is given the role {role!r}, which is none of {list(ROLES)}")
    fitting = [[p for p in overrides if any(fnmatchcase(name, p) for name in names)] for names in parameters]
    unused = set(overrides).difference(*fitting)
    if parameters and unused:
        raise ValueError(f"no parameter has a name that fits {', '.join(map(repr, sorted(unused)))}")
    return [overrides[patterns[0]] if patterns else None for patterns in fitting]
