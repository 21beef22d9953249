"""Parameters by their place in a model: what each does (matrix, embedding, head, vector), and its layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from mechanic.torch.layout import Group

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

_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_LINEAR_NAMES = re.compile(r"Linear|^Conv1D$|Router|Gate$")  # class names; Conv1D is a linear layer of transformers
_HEAD_NAMES = re.compile(
    r"^((lm_|cls_|mlm_)?head|classifier|score|logits|unembed|embed_out|output_projection|qa_outputs|proj_out)$"
)
_WRAPPERS = re.compile(r"\.(base_layer|original_module)$")  # peft puts a layer inside another
_EMBEDDING_NAMES = re.compile(r"embed|(^|_)(pos|position|positions|token|tokens|wte|wpe)(_|$)", re.IGNORECASE)
_EXPERT_NAMES = re.compile(r"expert|moe", re.IGNORECASE)


class _Use(NamedTuple):
    """A place where a parameter is used: a tied one has several."""

    path: str  # of the module
    module: nn.Module
    entry: str  # the parameter's name in it

    @property
    def name(self) -> str:
        return f"{self.path}.{self.entry}" if self.path else self.entry


class Roles(Mapping[str, dict[str, nn.Parameter]]):
    """Parameters by role, then by name: ``roles(model)["matrix"]["blocks.0.fc.weight"]``. It prints as a table."""

    def __init__(self, by_role: Mapping[str, dict[str, nn.Parameter]]) -> None:
        self._by_role = {role: dict(by_role.get(role, {})) for role in ROLES}

    def __getitem__(self, role: str) -> dict[str, nn.Parameter]:
        return self._by_role[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_role)

    def __len__(self) -> int:
        return len(self._by_role)

    def of(self, name: str) -> str:
        """The role of the parameter of this name."""
        return next(role for role, named in self.items() if name in named)

    def __str__(self) -> str:
        lines = [f"{'role':<10}{'tensors':>8}{'numbers':>14}  names"]
        for role, named in self.items():
            if named:
                numbers = sum(p.numel() for p in named.values())
                first, *more = _abbreviated(named)
                lines.append(f"{role:<10}{len(named):>8}{numbers:>14,}  {first}")
                lines += [" " * 34 + line for line in more]
        return "\n".join(lines)

    __repr__ = __str__


def roles(model: nn.Module, overrides: Mapping[str, str] | None = None) -> Roles:
    """Sort the parameters of a model by what they do.

    A parameter that is used in several places is listed once, under its first name. A head that is tied to an
    embedding is an ``embedding``. The head is a linear layer outside of the repeated blocks, with a name such as
    ``lm_head`` or ``classifier``, or the last one. A matrix of one row or one column is a ``vector``. What fits
    nowhere is ``other``. Parameters that are not of floating point, as quantized ones, cannot be trained and are left
    out.

    Args:
        model: whose parameters to sort.
        overrides: roles by patterns of names, as ``{"*.router.weight": "vector"}``. The first that fits is taken. A
            pattern that fits no parameter is an error.

    Example:
        >>> import torch
        >>> from mechanic.torch import roles
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 9))
        >>> print(roles(model))
        role       tensors       numbers  names
        matrix           1            32  1.weight
        embedding        1            36  0.weight
        head             1            72  2.weight
        vector           2            17  *.bias (2)
    """
    overrides = dict(overrides or {})
    for pattern, role in overrides.items():
        if role not in ROLES:
            raise ValueError(f"{pattern!r} is given the role {role!r}, which is none of {list(ROLES)}")
    uses: dict[nn.Parameter, list[_Use]] = {}
    for path, module in model.named_modules():
        for entry, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(p, UninitializedParameter):
                raise ValueError(f"{path}.{entry} has no shape yet; run the model once, then ask for its roles")
            if p.is_floating_point() or p.is_complex():
                uses.setdefault(p, []).append(_Use(path, module, entry))
    heads = _heads(model)
    by_role: dict[str, dict[str, nn.Parameter]] = {}
    unused = set(overrides)
    for p, used in uses.items():
        fitting = [pattern for pattern in overrides if any(fnmatchcase(use.name, pattern) for use in used)]
        unused -= set(fitting)
        role = overrides[fitting[0]] if fitting else _role_of(p, used, heads)
        by_role.setdefault(role, {})[used[0].name] = p
    if unused:
        raise ValueError(f"no parameter has a name that fits {', '.join(map(repr, sorted(unused)))}")
    return Roles(by_role)


def layer_groups(module: torch.nn.Module, groups: Iterable[Group] | None = None) -> list[Group]:
    """Param groups that give every layer of a module a tuner of its own.

    A layer is a submodule that holds parameters directly, so a weight and its bias stay together.

    Args:
        module: whose layers to tell apart.
        groups: your own groups, if you have any, with their options; each is split by layer, and parts of one
            layer in several groups (decay and no decay) share its tuner. A group that names a ``"tuner"`` is kept.

    Example:
        >>> import torch
        >>> from mechanic.torch import Mechanic, layer_groups
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = Mechanic(torch.optim.AdamW(layer_groups(model), lr=1.0))
        >>> optimizer.scales()
        {'0': 0.0, '2': 0.0}
    """
    layer_of: dict[Tensor, str] = {p: name.rpartition(".")[0] for name, p in module.named_parameters()}
    split: list[Group] = []
    for group in [{"params": module.parameters()}] if groups is None else groups:
        if "tuner" in group:
            split.append(group)
            continue
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        params = [p[1] if isinstance(p, tuple) else p for p in params]  # with their names, as torch takes them
        if any(p not in layer_of for p in params):
            raise ValueError("a group has parameters that are not the module's; give them a 'tuner' of their own")
        split += [
            {**group, "params": [p for p in params if layer_of[p] == layer], "tuner": layer}
            for layer in dict.fromkeys(layer_of[p] for p in params)
        ]
    return split


def _role_of(p: nn.Parameter, used: list[_Use], heads: set[nn.Module]) -> str:
    """The role of a parameter. In several places it has that of an embedding if it is one anywhere, else the first."""
    found = [_role_in(p, use, heads) for use in used]
    return "embedding" if "embedding" in found else found[0]


def _role_in(p: nn.Parameter, use: _Use, heads: set[nn.Module]) -> str:
    path, module, entry = use
    long_dims = sum(size > 1 for size in p.shape)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if p.ndim < 2 or (long_dims < 2 and not isinstance(module, _CONVOLUTIONS) and module not in heads):
        return "vector"
    if isinstance(module, _CONVOLUTIONS):
        return "embedding" if _EMBEDDING_NAMES.search(path) else "conv"
    if "lora_embedding_A" in use.name:  # a table, as what it is added to
        return "embedding"
    if p.ndim == 2 and "lora_" in use.name:
        return "matrix"
    if p.ndim == 2 and module in heads:
        return "head"
    if p.ndim == 2 and (_is_linear(module) or isinstance(module, (nn.MultiheadAttention, nn.RNNBase))):
        return "matrix"
    if p.ndim == 3 and (_EXPERT_NAMES.search(use.name) or _EXPERT_NAMES.search(type(module).__name__)):
        return "experts"
    if _EMBEDDING_NAMES.search(entry) or _EMBEDDING_NAMES.search(type(module).__name__):
        return "embedding"
    return "other"


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or bool(_LINEAR_NAMES.search(type(module).__name__))


def _heads(model: nn.Module) -> set[nn.Module]:
    """Linear layers outside of blocks that are named like a head, and the last one, unless it is a pooler."""
    linear = [(path, m) for path, m in _outside_blocks(model) if _is_linear(m) and "lora_" not in path]
    linear = [(path, module) for path, module in linear if isinstance(getattr(module, "weight", None), nn.Parameter)]
    named = {module for path, module in linear if _HEAD_NAMES.search(_WRAPPERS.sub("", path).rpartition(".")[2])}
    last = [module for path, module in linear[-1:] if "pool" not in path]
    return named | set(last if not named else ())


def _outside_blocks(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The submodules that are in no repeated block, which is a module with parts in a list of such modules."""
    yield path, module
    children = list(module.named_children())
    for name, child in children:
        has_parts = next(child.children(), None) is not None
        alike = sum(type(other) is type(child) for _, other in children)
        is_list = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and alike > 1)
        if not (is_list and has_parts):
            yield from _outside_blocks(child, f"{path}.{name}" if path else name)


def _abbreviated(names: Mapping[str, nn.Parameter]) -> list[str]:
    """Names with a star for numbers, so that all layers take one line."""
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(re.sub(r"(?<![^.])\d+(?=\.)", "*", name), []).append(name)
    return [f"{short} ({len(full)})" if len(full) > 1 else full[0] for short, full in counts.items()]
