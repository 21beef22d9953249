"""Parameters spread over processes: the part each rank holds, and the one sum over ranks.

Mechanic works on local tensors. Its five sums add up over shards, so it needs only one all-reduce of five numbers per
tuner and step, whatever the layout. Parameters that several ranks hold are weighted so that they count once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from mechanic.torch.private import is_fsdp1_parameter, root_mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def dtensor_class() -> Any:
    """None if it was never imported: a DTensor implies that it was, and importing it takes 0.7 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_dtensor(tensor: Tensor) -> bool:
    dtensor = dtensor_class()
    return dtensor is not None and isinstance(tensor, dtensor)


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor: the tensor itself, unless it is a DTensor."""
    found: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return found


def like(p: Any, data: Tensor) -> Tensor:
    """A tensor that is spread over the ranks as p is, with other data on this one."""
    if not is_dtensor(p):
        return data
    options = {"run_check": False, "shape": p.shape, "stride": p.stride()}
    found: Tensor = dtensor_class().from_local(data, p.device_mesh, p.placements, **options)
    return found


def cut_grad_as_parameter(p: Any) -> None:
    """Give a DTensor's gradient the placements of the parameter: autograd may leave it as partial sums."""
    grad = p.grad
    if grad is not None and grad.placements != p.placements:
        p.grad = grad.redistribute(placements=p.placements)


def is_split_too_far(p: Tensor) -> bool:
    """Whether a DTensor has fewer rows, or columns, than ranks they are split over."""
    ranks: dict[int, int] = {}
    if is_dtensor(p):
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        for mesh_dim, placement in enumerate(placements):
            if (dim := getattr(placement, "dim", None)) is not None:
                ranks[dim] = ranks.get(dim, 1) * mesh.size(mesh_dim)
    return any(p.shape[dim] < count for dim, count in ranks.items())


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

    def __init__(self, params: Iterable[Tensor], process_group: ProcessGroup | None, elements: int = 0) -> None:
        params = list(params)
        if any(hasattr(p, "ds_id") for p in params):
            raise ValueError(
                "Mechanic does not work under DeepSpeed's ZeRO stage 3, which steps its optimizer part by part and "
                "pads the parts with uninitialised memory; use stage 1 or 2 with one param group, or fully_shard"
            )
        layouts = {(p.device_mesh, p.placements) for p in params if is_dtensor(p)}  # type: ignore[attr-defined]
        if process_group is None and any(is_fsdp1_parameter(p) for p in params):
            raise ValueError(
                "under FullyShardedDataParallel every rank holds other data in plain tensors; tell Mechanic the group "
                "to sum over, Mechanic(base, process_group=torch.distributed.group.WORLD), or use fully_shard"
            )
        if process_group is None and _are_partitions(params, elements):
            raise ValueError(
                "every rank holds a partition of the parameters in plain tensors, as under DeepSpeed's ZeRO; tell "
                "Mechanic the group to sum over, Mechanic(base, process_group=torch.distributed.group.WORLD)"
            )
        self.group = process_group or _group_of(layouts)
        self._names: list[str] | None = None  # of the tuners, once all ranks were found to have the same
        size = 1 if self.group is None else self.group.size()
        self._plain_weight = 1.0 if process_group else 1.0 / size
        self._weights = {
            (mesh, placements): _distinct_shards(mesh, placements) / (root_mesh(mesh).size() if process_group else size)
            for mesh, placements in layouts
        }

    def knows(self, params: Iterable[Tensor]) -> bool:
        """Whether it was made for parameters with these placements: frameworks swap parameters for sharded ones."""
        dtensor = dtensor_class()
        return dtensor is None or all(
            (p.device_mesh, p.placements) in self._weights for p in params if isinstance(p, dtensor)
        )

    def weight(self, p: Tensor) -> float:
        """The weight that makes a parameter count once in the sum over the group."""
        if is_dtensor(p):
            return self._weights[p.device_mesh, p.placements]  # type: ignore[attr-defined]
        return self._plain_weight

    def sum(self, sums: Tensor, names: list[str]) -> Tensor:
        """The only collective, but for one that compares the names of the tuners when they are new."""
        if self.group is not None:
            if type(sums) is Tensor:  # and not a fake one
                self._compare(names)
            dist.all_reduce(sums, group=self.group)
        return sums

    def _compare(self, names: list[str]) -> None:
        """Raise if another rank has other tuners, or in another order: the sums of different tuners would be added."""
        if names == self._names or self.group is None:
            return
        found: list[list[str]] = [[]] * self.group.size()
        dist.all_gather_object(found, names, group=self.group)
        if any(others != names for others in found):
            raise ValueError(
                f"the ranks have different tuners, or have them in another order: {_differences(found)}. Build the "
                "param groups in the same order on every rank, for example from a list and not from a set"
            )
        self._names = names


def mean_over_copies(sums: Tensor, group: ProcessGroup | None) -> Tensor:
    """The mean over all ranks if each holds a copy of the model, as under DDP; else as it is.

    Gradients of a held-out batch may not have been reduced, and each rank would then go its own way.
    """
    if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
        sums /= dist.get_world_size()
    return sums


def _differences(found: list[list[str]]) -> str:
    ranks_by_names: dict[str, list[int]] = {}
    for rank, names in enumerate(found):
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        ranks_by_names.setdefault(f"{len(names)} ({shown})", []).append(rank)
    return "; ".join(f"rank {ranks[0]} has {names}" for names, ranks in ranks_by_names.items())


class SharedGroup:
    """A process group as something that can be copied; only the group of all ranks can be pickled."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> SharedGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is None:
            return SharedGroup, (None,)
        if self.group is not dist.group.WORLD:
            raise TypeError(
                "a Mechanic with a process_group other than torch.distributed.group.WORLD cannot be pickled; "
                "save its state_dict()"
            )
        return _group_of_all, ()


def _group_of_all() -> SharedGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            "a Mechanic with a process_group can be unpickled after torch.distributed.init_process_group"
        )
    return SharedGroup(dist.group.WORLD)


def require_final_gradients(params: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Raise if a hook on a parameter sees a gradient that is not summed over the ranks yet."""
    if any(is_fsdp1_parameter(p) for p in params):
        raise ValueError(
            "FullyShardedDataParallel reduces gradients after the hooks on parameters have run, so it cannot be "
            "stepped inside the backward pass; shard with fully_shard"
        )
    if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            "DistributedDataParallel averages gradients after the hooks on parameters have run, so it cannot be "
            "stepped inside the backward pass; shard with fully_shard. If every rank trains a model of its own, give "
            "Mechanic a group of this rank alone, Mechanic(base, process_group=...)"
        )


def _are_partitions(params: list[Tensor], elements: int) -> bool:
    """Whether a framework has replaced the model's parameters by tensors of its own that hold fewer elements."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    swapped = any(not isinstance(p, torch.nn.Parameter) for p in params)
    return swapped and sum(p.numel() for p in params) < elements


def _sharded_dims(placements: Any) -> list[int]:
    return [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]


def _distinct_shards(mesh: Any, placements: Any) -> int:
    return math.prod(mesh.size(dim) for dim in _sharded_dims(placements))


def _group_of(layouts: set[tuple[Any, Any]]) -> ProcessGroup | None:
    """The smallest known group that holds every shard of every parameter; None if nothing is sharded."""
    sharded = [(mesh, placements) for mesh, placements in layouts if _sharded_dims(placements)]
    if not sharded:
        return None
    roots = {root_mesh(mesh) for mesh, _ in layouts}
    if len(roots) == 1:
        root = roots.pop()
        dims = {_dim_of_root(root, mesh, dim) for mesh, placements in sharded for dim in _sharded_dims(placements)}
        if len(dims) == 1 and None not in dims:
            return root.get_group(dims.pop())  # type: ignore[no-any-return]
        roots = {root}
    world = dist.group.WORLD
    if world is None or any(root.size() != world.size() for root in roots):
        sizes = sorted(root.size() for root in roots)
        raise ValueError(
            f"the parameters lie on meshes of {sizes} ranks of {dist.get_world_size()}; tell Mechanic the group to "
            "sum over, Mechanic(base, process_group=...)"
        )
    return world


def _dim_of_root(root: Any, mesh: Any, dim: int) -> int | None:
    """Which dimension of the root mesh a dimension of a submesh is; None if it is made of several."""
    if mesh == root:
        return dim
    names = root.mesh_dim_names or ()
    name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else None
    return names.index(name) if name in names else None
