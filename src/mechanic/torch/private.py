"""All private names of PyTorch's that Mechanic uses, so that a new version can be checked in one place.

Each function says why the public API is not enough. ``tests/torch/test_private.py`` has a test for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

F = TypeVar("F", bound=Callable[..., Any])

# One call for a list of tensors. torch's own optimizers use the same functions; there are no public ones.
foreach_add_ = torch._foreach_add_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_

# Join tensors into a flat one; DDP's buckets are made this way.
flatten: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors


def outside_of_compiled_code(function: F) -> F:
    """Have ``torch.compile`` call a function as it is, not trace it.

    ``torch.compiler.disable`` imports the compiler at once, which takes a second. This does when the function is first
    called, as torch's own optimizers do when they are built.
    """
    return _disable_dynamo(function)  # type: ignore[return-value]


def is_inside_backward() -> bool:
    """Whether the caller runs inside a backward pass, for instance in a hook on a gradient."""
    return bool(torch._C._current_graph_task_id() != -1)


def root_mesh(mesh: Any) -> Any:
    """The mesh that a submesh was taken from."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # until torch 2.6

    return _mesh_resources.get_root_mesh(mesh)


def is_fsdp1_parameter(p: Tensor) -> bool:
    """Whether ``FullyShardedDataParallel`` made it: a plain tensor, of which every rank holds other data."""
    return bool(getattr(p, "_fsdp_flattened", False))


def run_hooks(optimizers: Iterable[Any], *, after: bool) -> None:
    """Run the hooks before or after the step of some optimizers. torch runs them only around a step of its own.

    After it, schedulers know that the optimizers have stepped; they warn if they step first.
    """
    for optimizer in optimizers:
        hooks = optimizer._optimizer_step_post_hooks if after else optimizer._optimizer_step_pre_hooks
        for hook in list(hooks.values()):
            hook(optimizer, (optimizer,), {})
        if after:
            optimizer._opt_called = True


def step_without_hooks(optimizer: Optimizer) -> None:
    """The step of the optimizer's class, without the hooks and the profiler's label that torch has wrapped around it.

    A scheduler or a compiler may have put another function in the place of the instance's ``step``.
    """
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "__code__", None) is _WRAPPER else step)(optimizer)


_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__


def run_state_dict_hooks(optimizer: Optimizer, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
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
