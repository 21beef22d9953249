"""What one optimizer step asks of a GPU, counted without one: kernel launches, operator calls, bytes, host reads.

Tensors on ``device="meta"`` stand in for those of a GPU. Optimizers take the same paths with them, nothing is
allocated, and nothing is computed. :class:`Counter` sees every operator call and sorts it: views and allocations are
free, reads of a value on the host are counted, and everything else is one call and one or more launches.

Calls, bytes and host reads need no assumption about kernels. Launches do; nothing was profiled on a device:

- An operator is one launch, but for those below.
- A list operator of torch (``_foreach_*``, ``_fused_*``) works on chunks of 65,536 elements. One launch takes as many
  tensors and chunks as its arguments can hold, see :data:`CUDA_13` and :data:`CUDA_12`; ROCm has the limits of CUDA 12.
  These are the constants of ``ATen/native/cuda/MultiTensorApply.cuh`` in torch 2.13.
- A list operator takes one launch per tensor instead if its lists differ in shapes, strides or dtypes, or hold tensors
  with gaps. A copy between lists may change the dtype. ``addcmul`` also takes 0-dim tensors for one factor (in torch
  since January 2026, pull request 172731).
- ``_foreach_norm`` ends with one launch per 400 tensors (3,200 with CUDA 13) and begins with two fills.
- ``dot`` is two kernels of cuBLAS. ``cat`` and ``stack`` take 128 tensors per launch.

Bytes are those of all arguments and results, each read or written once per call, as the operator's schema tells.
"""

from __future__ import annotations

import sys
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CHUNK = 65_536
"""Elements that one block of a list operator works on."""

TENSORS_PER_CAT = 128
KERNELS = {"dot": 2, "vdot": 2}


@dataclass(frozen=True)
class Limits:
    """What one launch of a list operator can take."""

    tensors: tuple[int, ...]  # by the number of lists, from one to five
    tensors_with_numbers: tuple[int, ...]  # the same, with one number per tensor
    chunks: int
    norms: int  # tensors per closing launch of _foreach_norm


CUDA_13 = Limits((770, 448, 336, 252, 210), (672, 448, 336, 252, 210), 2_240, 3_200)
CUDA_12 = Limits((110, 64, 48, 36, 30), (96, 64, 48, 36, 30), 320, 400)
LIMITS = (CUDA_12, CUDA_13)

DEVICE = "meta"
_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_FREE = {"_unsafe_view", "_reshape_alias", "set_", "resize_", "is_same_size", "is_pinned"}
_READ = {"_local_scalar_dense", "is_nonzero", "item"}
_READ_INSIDE = {"nonzero", "equal", "masked_select"}  # their result or its size goes to the host
_COPY = {"copy_", "_to_copy", "_foreach_copy_"}
_ONLY_WRITE = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}


class Counter(TorchDispatchMode):
    """Counts what is asked of the device while it is entered.

    A meta tensor has no value. Where one is read on the host, the answer is 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tally[str] = Tally()  # by operator
        self.launches: dict[Limits, Tally[str]] = {limits: Tally() for limits in LIMITS}
        self.host_reads = 0
        self.copies_to_device = 0
        self.bytes = 0
        self._constructors = _TensorsFromHost(self)

    def __enter__(self) -> Counter:
        self._constructors.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._constructors.__exit__(*error)

    def launches_with(self, limits: Limits) -> int:
        return sum(self.launches[limits].values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        if not call.is_on_device(call.inputs) or call.is_free:
            result = call.run()
            outputs = _tensors(result)
            if not call.is_free and call.is_on_device(outputs):  # made from nothing, or copied there
                self._count(call, outputs)
            return result
        if call.name in _READ:
            self.host_reads += 1
            return torch.ones((), dtype=call.inputs[0].dtype).item()
        if call.name in _READ_INSIDE:
            self.host_reads += 1
        if call.name in _COPY and (to_host := call.copy_to_host()) is not None:
            self.host_reads += 1
            return to_host
        result = call.stand_in()
        self._count(call, _tensors(result))
        return result

    def _count(self, call: Call, outputs: list[Tensor]) -> None:
        self.copies_to_device += call.name in _COPY and any(t.device.type == "cpu" for t in call.sources())
        self.calls[call.name] += 1
        self.bytes += call.bytes(outputs)
        for limits, launches in self.launches.items():
            launches[call.name] += call.launches(limits)


class _TensorsFromHost(TorchFunctionMode):
    """Counts ``torch.tensor(numbers, device=...)``: a copy to the device that meta tensors leave out."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.device.type == DEVICE and not isinstance(args[0], Tensor):
            self.counter.copies_to_device += 1
        return result


@dataclass
class Call:
    """One call of an operator."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    name: str = field(init=False)
    inputs: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.func.overloadpacket.__name__
        self.inputs = _tensors((self.args, self.kwargs))

    @staticmethod
    def is_on_device(tensors: list[Tensor]) -> bool:
        return any(tensor.device.type == DEVICE for tensor in tensors)

    @property
    def is_free(self) -> bool:
        """Whether it only makes views, or memory that nobody has written to."""
        views = (returned.alias_info for returned in self.func._schema.returns)
        return (
            self.name in _ALLOCATE
            or self.name in _FREE
            or any(alias is not None and not alias.is_write for alias in views)
        )

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def stand_in(self) -> Any:
        """Its result, without asking torch where that is known: not every operator has a version for meta tensors."""
        if self.name.startswith(("_fused", "_foreach", "_amp_foreach")) and self.name.endswith("_"):
            return None
        if self.name == "dot":
            return self.args[0].new_empty(())
        is_in_place = self.name.endswith("_") and not self.name.endswith("__")
        return self.args[0] if is_in_place and isinstance(self.args[0], Tensor) else self.run()

    def sources(self) -> list[Tensor]:
        """What a copy reads."""
        return _tensors(self.args[0] if self.name == "_to_copy" else self.args[1])

    def copy_to_host(self) -> Any:
        """What a copy to the host returns; None if it is not one."""
        if self.name == "_to_copy":
            device = self.kwargs.get("device")
            if device is None or torch.device(device).type == DEVICE:
                return None
            return torch.ones(self.args[0].shape, dtype=self.kwargs.get("dtype") or self.args[0].dtype)
        return None if self.is_on_device(_tensors(self.args[0])) else self.args[0]

    def bytes(self, outputs: list[Tensor]) -> int:
        arguments = self.func._schema.arguments
        given = [*zip(arguments, self.args, strict=False)]
        given += [(argument, self.kwargs[argument.name]) for argument in arguments if argument.name in self.kwargs]
        total, seen = 0, set()
        for argument, value in given:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if self.name.startswith("_fused") and argument.name == "grads":
                is_written = False  # only with a loss scale
            is_read = not (is_written and self.name in _ONLY_WRITE)
            for tensor in _tensors(value):
                if tensor.device.type != DEVICE:
                    continue
                total += tensor.nbytes * ((is_read and id(tensor) not in seen) + is_written)
                seen.add(id(tensor))
        return total + sum(t.nbytes for t in outputs if t.device.type == DEVICE and id(t) not in seen)

    def launches(self, limits: Limits) -> int:
        lists = [value for value in self.args if isinstance(value, (list, tuple)) and value and _tensors(value)]
        if self.name in ("cat", "stack"):
            return -(-len(lists[0]) // TENSORS_PER_CAT)
        if self.name.startswith("_fused"):
            has_steps = "adam" in self.name or "adagrad" in self.name
            return _launches_of_list(lists[0], len(lists) - has_steps, limits.tensors, limits.chunks)
        if not self.name.startswith(("_foreach", "_amp_foreach")):
            return KERNELS.get(self.name, 1)
        if not self._takes_whole_lists(lists):
            return len(lists[0])
        if self.name in ("_foreach_norm", "_foreach_powsum"):
            reduced = _launches_of_list(lists[0], 1, limits.tensors, limits.chunks)
            return reduced + -(-len(lists[0]) // limits.norms) + 2
        depth = 1 if self.name.startswith("_amp") else len(lists) + (not self.name.endswith("_"))
        has_numbers = self.func._overloadname == "ScalarList"
        tensors = limits.tensors_with_numbers if has_numbers else limits.tensors
        return _launches_of_list(lists[0], depth, tensors, limits.chunks)

    def _takes_whole_lists(self, lists: list[Sequence[Tensor]]) -> bool:
        dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
        factor = next((value for value in self.args if isinstance(value, Tensor)), None)  # one for all tensors
        if factor is not None:
            dtypes.append({factor.dtype})
        if not (
            all(len(one) == 1 for one in dtypes) if self.name == "_foreach_copy_" else len(set.union(*dtypes)) == 1
        ):
            return False
        if self.name.startswith("_foreach_addcmul") and not _are_alike(lists):
            lists = [lists[0], *(tensors for tensors in lists[1:] if any(t.ndim for t in tensors))]
        return _are_alike(lists)


def _are_alike(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether lists of tensors can be worked on as flat memory."""
    return all(
        len({(t.shape, t.stride()) for t in tensors}) == 1 and _is_dense(tensors[0])
        for tensors in zip(*lists, strict=True)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _launches_of_list(tensors: Sequence[Tensor], depth: int, limit_by_depth: Sequence[int], most_chunks: int) -> int:
    """How often ``multi_tensor_apply`` fills its arguments with tensors or chunks."""
    most_tensors = limit_by_depth[min(depth, 5) - 1]
    launches = waiting_tensors = waiting_chunks = 0
    for tensor in tensors:
        chunks = -(-tensor.numel() // CHUNK)
        if not chunks:
            continue
        waiting_tensors += 1
        while chunks:
            taken = min(chunks, most_chunks - waiting_chunks)
            chunks -= taken
            waiting_chunks += taken
            if waiting_chunks == most_chunks or (waiting_tensors == most_tensors and not chunks):
                launches += 1
                waiting_chunks, waiting_tensors = 0, int(chunks > 0)
    return launches + (waiting_chunks > 0)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let torch's optimizers take meta tensors for those of a GPU: with ``fused=True`` and ``foreach=True``."""
    names = "_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices"
    with ExitStack() as stack:
        for module in [m for name, m in list(sys.modules.items()) if name.startswith("torch.") and "optim" in name]:
            for name in names:
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, lambda: [DEVICE, "cuda", "cpu"]))
        for name in names:
            stack.enter_context(patch.object(torch.utils._foreach_utils, name, lambda: [DEVICE, "cuda", "cpu"]))
        yield


def count_step(
    build: Callable[[list[Tensor]], Any],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[Any], Any] = lambda optimizer: None,
) -> Counter:
    """Count the second step of an optimizer of parameters with these shapes; ``prepare`` is called between the two."""
    params: list[Tensor] = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=DEVICE)) for shape in shapes]
    with as_on_a_gpu():
        with Counter():  # some optimizers read values when they are built
            optimizer = build(params)
            for p in params:
                p.grad = torch.empty_like(p)
            optimizer.step()
            prepare(optimizer)
        with Counter() as counted:
            optimizer.step()
    return counted
