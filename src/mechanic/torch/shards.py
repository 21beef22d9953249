"""Parameters spread over processes: the part each rank holds, and the one sum over ranks.

Mechanic works on local tensors. Its five sums add up over shards, so it needs only one all-reduce of five numbers per
tuner and step, whatever the layout. Parameters that several ranks hold are weighted so that they count once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from mechanic.torch.private import is_fsdp1_parameter, root_mesh


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor. If there is one, its module was imported; to import it here would take 0.7 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor: the tensor itself, unless it is a DTensor."""
    found: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return found


def like(p: Any, data: Tensor) -> Tensor:
    """A tensor that is spread over the ranks as p is, with other data on this one."""
    if not is_dtensor(p):
        return data
    options = {"run_check": False, "shape": p.shape, "stride": p.stride()}
    found: Tensor = p.from_local(data, p.device_mesh, p.placements, **options)
    return found


def cut_grad_as_parameter(p: Any) -> None:
    """Give a DTensor's gradient the placements of the parameter: autograd may leave it as partial sums."""
    grad = p.grad
    if grad is not None and grad.placements != p.placements:
        p.grad = grad.redistribute(placements=p.placements)


def refuse_parts_of_matrices(name: str, params: Iterable[Tensor]) -> None:
    """Raise if a Muon would step on parts of matrices: made orthogonal one by one, they give another update.

    DTensors are no such parts: what Muon computes with them, torch computes with the whole.
    """
    for p in params:
        if is_fsdp1_parameter(p) or (p.ndim < 2 and not isinstance(p, torch.nn.Parameter)):
            raise ValueError(
                f"{name} needs whole matrices, and under FullyShardedDataParallel or DeepSpeed's ZeRO it is given flat "
                "parts of them; shard with fully_shard, whose parts it can gather, or use DDP"
            )
        if is_dtensor(p) and any(length < _ranks_along(p, dim) for dim, length in enumerate(p.shape)):
            raise ValueError(
                f"{name} cannot step on a matrix that is split over more ranks than it has rows or columns, here one "
                f"of shape {tuple(p.shape)}; give it to another optimizer, as MechanicMuon(model, roles={{its name: "
                "'vector'}) does, or shard it over fewer ranks"
            )


def _ranks_along(p: Any, dim: int) -> int:
    """How many ranks the rows, or the columns, of a DTensor are split over."""
    split = [getattr(placement, "dim", None) == dim for placement in p.placements]
    return math.prod(p.device_mesh.size(mesh_dim) for mesh_dim, is_split in enumerate(split) if is_split)


def shard_number(p: Any) -> int:
    """Which of a DTensor's shards this rank holds: the same on ranks that hold the same one."""
    number = 0
    for dim in _sharded_dims(p.placements):
        number = number * p.device_mesh.size(dim) + p.device_mesh.get_local_rank(dim)
    return number


class Reduction:
    """The group of ranks to sum over, and how much of a parameter's local sum counts in it.

    Args:
        params: all parameters of the optimizer.
        process_group: a group in which every rank holds plain tensors of its own (pipeline stages, FSDP1, ZeRO).
            Without it, plain tensors are assumed to be the same on every rank, as under DDP.
        elements: how many elements the parameters had when the optimizer was built.
    """

    def __init__(self, params: Iterable[Tensor], process_group: dist.ProcessGroup | None, elements: int = 0) -> None:
        params = list(params)
        if any(hasattr(p, "ds_id") for p in params):
            raise ValueError(
                "Mechanic does not work under DeepSpeed's ZeRO stage 3, which steps its optimizer part by part and "
                "pads the parts with uninitialised memory; use stage 1 or 2 with one param group, or fully_shard"
            )
        swapped = any(not isinstance(p, torch.nn.Parameter) for p in params)  # for tensors of a framework's own
        are_parts = swapped and _there_are_others() and sum(p.numel() for p in params) < elements
        if process_group is None and (are_parts or any(is_fsdp1_parameter(p) for p in params)):
            raise ValueError(
                "every rank holds other data in plain tensors, as under FullyShardedDataParallel and DeepSpeed's ZeRO; "
                "tell Mechanic the group to sum over, Mechanic(base, process_group=torch.distributed.group.WORLD), or "
                "use fully_shard"
            )
        layouts = {_layout(p) for p in params if is_dtensor(p)}
        self.group = process_group or _group_of(layouts)
        self._names: list[str] | None = None  # of the tuners, once all ranks were found to have the same
        ranks = 1 if self.group is None else self.group.size()
        self._weights: dict[Any, float] = {None: 1.0 if process_group else 1.0 / ranks}
        for mesh, placements in layouts:
            copies = root_mesh(mesh).size() if process_group else ranks
            shards = math.prod(mesh.size(dim) for dim in _sharded_dims(placements))
            self._weights[mesh, placements] = shards / copies

    def knows(self, params: Iterable[Tensor]) -> bool:
        """Whether it was made for parameters with these placements: frameworks swap parameters for sharded ones."""
        return all(_layout(p) in self._weights for p in params)

    def weight(self, p: Tensor) -> float:
        """The weight that makes a parameter count once in the sum over the group."""
        return self._weights[_layout(p)]

    def sum(self, sums: Tensor, names: list[str]) -> Tensor:
        """The only collective, but for one that compares the names of the tuners when they are new."""
        if self.group is not None:
            if names != self._names and type(sums) is Tensor:  # and not a fake one
                _require_same(names, self.group)
                self._names = names
            dist.all_reduce(sums, group=self.group)
        return sums

    def mean_over_copies(self, sums: Tensor) -> Tensor:
        """The mean over all ranks if each holds a copy of the model, as under DDP; else as it is.

        Gradients of a held-out batch may not have been reduced, and each rank would then go its own way.
        """
        if self.group is None and _there_are_others():
            dist.all_reduce(sums)
            sums /= dist.get_world_size()
        return sums

    def require_final_gradients(self, params: Iterable[Tensor]) -> None:
        """Raise if a hook on a parameter sees a gradient that is not summed over the ranks yet."""
        if any(is_fsdp1_parameter(p) for p in params) or (self.group is None and _there_are_others()):
            raise ValueError(
                "DistributedDataParallel and FullyShardedDataParallel reduce gradients after the hooks on parameters "
                "have run, so they cannot be stepped inside the backward pass; shard with fully_shard. If every rank "
                "trains a model of its own, give Mechanic a group of this rank alone, Mechanic(base, process_group=...)"
            )


def _require_same(names: list[str], group: dist.ProcessGroup) -> None:
    """Raise if another rank has other tuners, or in another order: the sums of different tuners would be added."""
    found: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(found, names, group=group)
    for rank, others in enumerate(found):
        for ours, theirs in zip_longest(names, others, fillvalue="none"):
            if ours != theirs:
                raise ValueError(
                    "the ranks have different tuners, or have them in another order: where this one has the tuner "
                    f"{ours}, rank {rank} has {theirs}. Build the param groups in the same order on every rank, for "
                    "example from a list and not from a set"
                )


class SharedGroup:
    """A process group as something that can be copied; only the group of all ranks can be pickled."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    @classmethod
    def of(cls, group: Any) -> SharedGroup:
        return group if isinstance(group, cls) else cls(group)

    def __deepcopy__(self, memo: Any) -> SharedGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None and self.group is dist.group.WORLD:
            return _group_of_all, ()
        return SharedGroup, (self.group,)  # torch raises if there is one


def _group_of_all() -> SharedGroup:
    dist.get_rank()  # raises before init_process_group
    return SharedGroup(dist.group.WORLD)


def _there_are_others() -> bool:
    """Whether this is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _layout(p: Any) -> Any:
    """The mesh and the placements of a DTensor; None of a plain tensor."""
    return (p.device_mesh, p.placements) if is_dtensor(p) else None


def _sharded_dims(placements: Any) -> list[int]:
    return [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]


def _group_of(layouts: set[tuple[Any, Any]]) -> dist.ProcessGroup | None:
    """The smallest known group that holds every shard of every parameter; None if nothing is sharded."""
    dims = {(mesh, dim) for mesh, placements in layouts for dim in _sharded_dims(placements)}
    if not dims:
        return None
    if len(dims) == 1:
        mesh, dim = dims.pop()
        return mesh.get_group(dim)  # type: ignore[no-any-return]
    world, sizes = dist.get_world_size(), sorted({root_mesh(mesh).size() for mesh, _ in layouts})
    if sizes != [world]:
        raise ValueError(
            f"the parameters lie on meshes of {sizes} ranks of {world}; tell Mechanic the group to sum over, "
            "Mechanic(base, process_group=...)"
        )
    return dist.group.WORLD
