"""All private names of PyTorch's that Mechanic uses, so that a new version can be checked in one place.

Each function says why the public API is not enough. ``tests/torch/test_private.py`` has a test for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

P = ParamSpec("P")
R = TypeVar("R")

# One call for a list of tensors. torch's own optimizers use the same functions; there are no public ones.
foreach_add_ = torch._foreach_add_
foreach_sub_ = torch._foreach_sub_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_norm = torch._foreach_norm

# Join tensors into a flat one, and view a flat tensor in their shapes; DDP's buckets are made this way.
flatten: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors


def outside_of_compiled_code(function: Callable[P, R]) -> Callable[P, R]:
    """Have ``torch.compile`` call a function as it is, not trace it.

    ``torch.compiler.disable`` imports the compiler at once, and that takes a second.
    """
    not_traced = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return not_traced(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def is_inside_backward() -> bool:
    """Whether the caller runs inside a backward pass, for instance in a hook on a gradient."""
    return bool(torch._C._current_graph_task_id() != -1)


def local_tensor(dtensor: Any) -> Tensor:
    """The part of a DTensor that this rank holds. ``to_local()`` returns a new tensor, which cannot be written back."""
    return dtensor._local_tensor  # type: ignore[no-any-return]


def set_local_tensor(dtensor: Any, data: Tensor) -> None:
    """Let a DTensor hold other data under the same identity."""
    dtensor._local_tensor = data


def root_mesh(mesh: Any) -> Any:
    """The mesh that a submesh was taken from."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # until torch 2.6

    return _mesh_resources.get_root_mesh(mesh)


def is_fsdp1_parameter(p: Tensor) -> bool:
    """Whether ``FullyShardedDataParallel`` made it: a plain tensor, of which every rank holds other data."""
    return bool(getattr(p, "_fsdp_flattened", False))


def step_hooks(optimizer: Optimizer) -> list[Any]:
    """The hooks around an optimizer's step. torch can register and remove hooks, but not list them."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def run_state_dict_hooks(optimizer: Optimizer, make: Callable[[], Any]) -> Any:
    """``make()`` a state dict, with the hooks that torch's ``state_dict`` would call around it."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    state_dict = make()
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = post_hook(optimizer, state_dict) or state_dict
    return state_dict


def run_load_state_dict_hooks(optimizer: Optimizer, state_dict: Any, load: Callable[[Any], None]) -> None:
    """``load`` a state dict, with the hooks that torch's ``load_state_dict`` would call around it."""
    state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict  # hooks may write to it
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    load(state_dict)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


@contextmanager
def global_hooks_silenced() -> Iterator[None]:
    """Keep hooks on all optimizers to one call per step, Mechanic's own: the base's step is a part of it.

    The hooks are replaced by empty functions for the time being; there is no way to switch them off. If other threads
    step optimizers at the same moment, the hooks are silent for those as well.
    """
    registries = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    silenced: list[tuple[Any, dict[int, Any]]] = [(registry, dict(registry)) for registry in registries]
    for registry, hooks in silenced:
        registry.update(dict.fromkeys(hooks, _do_nothing))
    try:
        yield
    finally:
        for registry, hooks in silenced:
            registry.update((key, hook) for key, hook in hooks.items() if key in registry)  # it may have been removed


def _do_nothing(*args: Any) -> None:
    """Stands in for a hook."""


def mark_as_stepped(optimizer: Any) -> None:
    """Let schedulers know that the optimizer has stepped; they warn if they step first."""
    optimizer._opt_called = True
