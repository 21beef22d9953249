"""One step of a large sharded model on many ranks, on paper: fake tensors, a fake process group, real code.

``python -m tests.torch.on_paper RANKS [REPLICAS]`` prints as JSON what one rank of FSDP2 or HSDP would hold and send.
"""

import json
import sys

import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from mechanic.torch import Mechanic

WIDTH, BLOCKS = 8192, 5  # 4 billion parameters in few tensors


class Sent(TorchDispatchMode):
    """Bytes that all-reduces are called with."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allreduce_" in str(func) or "all_reduce" in str(func):
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return func(*args, **(kwargs or {}))


def main(ranks, replicas):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    if replicas == 1:
        mesh = init_device_mesh("cpu", (ranks,))
    else:
        mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
    with FakeTensorMode():
        model = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 32, 4 * WIDTH, batch_first=True) for _ in range(BLOCKS))
        )
        parameters = sum(p.numel() for p in model.parameters())
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            with CommDebugMode() as collectives, Sent() as sent:
                optimizer.step()
        local = [optimizer.state[p]["mechanic_delta"]._local_tensor for p in model.parameters()]
    found = {
        "parameters": parameters,
        "collectives per step": collectives.get_total_counts(),
        "bytes per step": sent.bytes,
        "bytes of Delta per rank": sum(delta.numel() * delta.element_size() for delta in local),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
