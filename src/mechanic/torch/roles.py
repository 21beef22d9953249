"""Parameters by their place in a model: what each does (matrix, embedding, head, vector), and its layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from mechanic.roles import EMBEDDING_NAMES, HEAD_NAMES, ROLES, given_roles, is_vector, role_by_name

_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_LINEAR = nn.Linear, nn.MultiheadAttention, nn.RNNBase
_LINEAR_NAMES = re.compile(r"Linear|^Conv1D$|Router|Gate$")  # class names; Conv1D is a linear layer of transformers
_WRAPPERS = re.compile(r"\.(base_layer|original_module)$")  # peft puts a layer inside another


class Roles(dict[str, dict[str, nn.Parameter]]):
    """Parameters by role, then by name: ``roles(model)["matrix"]["blocks.0.fc.weight"]``. It prints as a table."""

    def of(self, name: str) -> str:
        """The role of the parameter of this name."""
        return {each: role for role, named in self.items() for each in named}[name]

    def __repr__(self) -> str:
        lines = [f"{'role':<10}{'tensors':>8}{'numbers':>14}  names"]
        for role, named in self.items():
            left = f"{role:<10}{len(named):>8}{sum(p.numel() for p in named.values()):>14,}"
            alike: dict[str, list[str]] = {}  # names by what they are without the numbers of layers
            for name in named:
                alike.setdefault(re.sub(r"(?<![^.])\d+(?=\.)", "*", name), []).append(name)
            for short, names in alike.items():
                lines.append(f"{left:<32}  {f'{short} ({len(names)})' if len(names) > 1 else names[0]}")
                left = ""
        return "\n".join(lines)


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
    uses: dict[nn.Parameter, dict[str, nn.Module]] = {}  # the modules that have it, by its name there
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False, remove_duplicate=False):
            if isinstance(p, nn.UninitializedParameter):
                raise ValueError(f"{name} has no shape yet; run the model once, then ask for its roles")
            if p.is_floating_point() or p.is_complex():
                uses.setdefault(p, {})[name] = module
    heads = _heads(model)
    found = Roles({role: {} for role in ROLES})
    for (p, modules), given in zip(uses.items(), given_roles(uses.values(), overrides), strict=True):
        by_use = [_role_of(p, name, module, heads) for name, module in modules.items()]
        role = given or ("embedding" if "embedding" in by_use else by_use[0])
        found[role][next(iter(modules))] = p
    return found


def layer_groups(module: nn.Module, groups: Iterable[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
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
    split: list[dict[str, Any]] = []
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


def _role_of(p: nn.Parameter, name: str, module: nn.Module, heads: set[nn.Module]) -> str:
    """What the type of the module makes of it, and where that says nothing, what the names do."""
    path, _, entry = name.rpartition(".")
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, _CONVOLUTIONS) and p.ndim > 1:
        return "embedding" if EMBEDDING_NAMES.search(path) else "conv"
    if module in heads and p.ndim == 2:
        return "head"
    if _is_linear(module) and p.ndim == 2 and not is_vector(p.shape):
        return "matrix"
    return role_by_name(f"{path}.{type(module).__name__}.{entry}", p.shape)


def _is_linear(module: nn.Module) -> bool:
    """Whether its 2-dim parameters are matrices."""
    return isinstance(module, _LINEAR) or bool(_LINEAR_NAMES.search(type(module).__name__))


def _heads(model: nn.Module) -> set[nn.Module]:
    """Linear layers outside of blocks that are named like a head; else the last one, unless it is a pooler."""
    linear = [(path, m) for path, m in _outside_blocks(model) if _is_linear(m) and "lora_" not in path]
    linear = [(path, module) for path, module in linear if isinstance(getattr(module, "weight", None), nn.Parameter)]
    named = {module for path, module in linear if HEAD_NAMES.search(_WRAPPERS.sub("", path).rpartition(".")[2])}
    return named or {module for path, module in linear[-1:] if "pool" not in path}


def _outside_blocks(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The submodules that are in no repeated block, which is a module with parts in a list of such modules."""
    yield path, module
    types = [type(child) for child in module.children()]
    for name, child in module.named_children():
        has_parts = next(child.children(), None) is not None
        is_sequence = isinstance(module, nn.Sequential) and types.count(type(child)) > 1
        if not (has_parts and (is_sequence or isinstance(module, nn.ModuleList))):
            yield from _outside_blocks(child, f"{path}.{name}" if path else name)
