"""What a step does, counted in calls of operators and in the memory that they are given."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = {"alias", "as_strided", "detach", "permute", "reshape", "select", "slice", "split", "squeeze", "unbind", "view"}
FREE = {*VIEWS, "empty", "empty_like", "unsqueeze"}  # these touch no memory


class Traffic(TorchDispatchMode):
    """Counts operator calls, and the bytes of all tensors that they are given or make."""

    def __init__(self):
        super().__init__()
        self.calls = []  # (name, bytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in FREE:
            tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)}
            self.calls.append((name, sum(tensor.nbytes for tensor in tensors.values())))
        return result

    @property
    def bytes(self):
        return sum(size for _, size in self.calls)


def traffic(build, tensors, elements, prepare=lambda optimizer: None):
    """Of one step in mid-training; ``prepare`` is called with the optimizer before it."""
    params = [torch.nn.Parameter(torch.ones(elements)) for _ in range(tensors)]
    optimizer = build(params)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    prepare(optimizer)
    with Traffic() as seen:
        optimizer.step()
    return seen
