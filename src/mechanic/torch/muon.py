"""Muon for the matrices of a model and AdamW for the rest, as one Mechanic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from typing_extensions import Unpack  # which torch depends on

from mechanic.torch.base import is_flat_part
from mechanic.torch.layout import Group
from mechanic.torch.optimizer import Mechanic, MechanicOptions
from mechanic.torch.roles import Roles, roles
from mechanic.torch.shards import is_split_too_far
from mechanic.torch.together import Together


class MechanicMuon(Mechanic[Together]):
    """``torch.optim.Muon`` for the matrices of a model, AdamW for all else, and no learning rates.

    ``MechanicMuon(model)`` is ``Mechanic(Together(Muon(matrices), AdamW(rest)))``, with one param group per role of
    :func:`mechanic.torch.roles`. Only the role ``matrix`` goes to Muon, which takes 2-dim parameters only.

    Args:
        model: whose parameters to train, all of them. It is the model, not its parameters: names and modules tell
            which parameter does what.
        lr: the learning rate that counts as 1, for both. Its size does not matter.
        weight_decay: of both.
        momentum: of Muon.
        nesterov: of Muon.
        ns_steps: of Muon: how often it iterates to make an update orthogonal.
        adjust_lr_fn: of Muon: how its step grows with a matrix. The default gives it the size of AdamW's, so that one
            tuner can serve both.
        betas: of AdamW.
        eps: of AdamW.
        roles: roles by patterns of names where you want others, as ``{"*.router.weight": "vector"}``; or what
            :func:`mechanic.torch.roles` has returned. Parameters of the role ``other`` are refused by name.
        tuners: ``"one"`` for all, or one for every ``"role"``.
        options: those of :class:`Mechanic`.

    Example:
        >>> import torch
        >>> from mechanic.torch import MechanicMuon
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = MechanicMuon(model)  # doctest: +SKIP
        >>> [(group["optimizer"], group["role"]) for group in optimizer.param_groups]  # doctest: +SKIP
        [('Muon', 'matrix'), ('AdamW', 'head'), ('AdamW', 'vector')]
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1.0,
        weight_decay: float = 0.01,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        roles: Mapping[str, str] | Roles | None = None,
        tuners: Literal["one", "role"] = "one",
        **options: Unpack[MechanicOptions],
    ) -> None:
        if tuners not in ("one", "role"):
            raise ValueError(f"tuners must be 'one' or 'role', got {tuners!r}")
        matrices, rest = _groups(model, roles, name_tuners=tuners == "role")
        muon = _muon_class()(
            matrices,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        optimizers: list[Optimizer] = [muon]
        if rest:
            optimizers.append(AdamW(rest, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        super().__init__(Together(*optimizers), **options)


def _muon_class() -> Any:
    if not hasattr(torch.optim, "Muon"):
        version = torch.__version__
        raise RuntimeError(f"MechanicMuon needs torch.optim.Muon, which torch has from 2.9 on; this is {version}")
    return torch.optim.Muon


def _groups(
    model: nn.Module, wanted: Mapping[str, str] | Roles | None, *, name_tuners: bool
) -> tuple[list[Group], list[Group]]:
    """The param groups for Muon and those for AdamW, one by role."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"MechanicMuon takes the model, not its parameters, got {type(model).__name__}")
    if any(is_flat_part(p) for p in model.parameters()):
        raise ValueError(
            "Muon needs whole matrices, and FullyShardedDataParallel makes flat parts of them; shard with "
            "fully_shard, whose parts it can gather, or use DDP"
        )
    found = wanted if isinstance(wanted, Roles) else roles(model, wanted)
    if others := [name for name, p in found["other"].items() if p.requires_grad]:
        raise ValueError(
            f"what these parameters do is not known: {', '.join(others)}; say it, for example with "
            f"MechanicMuon(model, roles={{{others[0]!r}: 'vector'}})"
        )
    listed = {p for named in found.values() for p in named.values()}
    if strangers := [name for name, p in model.named_parameters() if p.requires_grad and p not in listed]:
        count, first = len(strangers), strangers[0]
        raise ValueError(f"the roles are of another model: they lack {first}, {count} in all; use roles(model)")
    for name, p in found["matrix"].items():
        if p.ndim != 2 or p.is_complex():
            kind = f"{p.ndim} dimensions" if p.ndim != 2 else "complex numbers"
            raise ValueError(f"{name} has {kind}, which Muon does not take: give it another role than 'matrix'")
        if is_split_too_far(p):
            raise ValueError(
                f"{name} of shape {tuple(p.shape)} is split over more ranks than it has rows or columns, and torch's "
                f"Muon fails with such: leave it to AdamW, MechanicMuon(model, roles={{{name!r}: 'vector'}}), or "
                "shard it over fewer ranks"
            )
    if not found["matrix"]:
        raise ValueError("the model has no matrices, so there is nothing for Muon; use MechanicAdamW")
    groups = {role: {"params": list(named.values()), "role": role} for role, named in found.items() if named}
    if name_tuners:
        groups = {role: {**group, "tuner": role} for role, group in groups.items()}
    return [groups.pop("matrix")], list(groups.values())
