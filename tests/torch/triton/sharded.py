"""Two ranks with DTensors, stepped by the eager kernels and by Triton's, interpreted: what test_sharded.py starts."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mechanic.torch import Mechanic
from tests.torch.triton.forcing import counted, using

SHAPES = [(7, 40), (3,), (1, 5)]  # the second rank holds fewer rows, or none


def course(kernels, mesh, delta=None):
    torch.manual_seed(0)
    placements = [Shard(0), Replicate(), Shard(0)]
    params = [
        torch.nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [placement]))
        for shape, placement in zip(SHAPES, placements, strict=True)
    ]
    optimizer = Mechanic(torch.optim.AdamW(params, lr=1.0, weight_decay=0.1), delta=delta)
    for _ in range(5):
        for p in params:
            p.grad = distribute_tensor(torch.randn(p.shape) + 0.3, mesh, p.placements)
        with using(kernels), counted() as started:
            optimizer.step()
    deltas = [optimizer.state[p]["mechanic_delta"] for p in params]
    return [t.full_tensor() for t in [*(p.detach() for p in params), *deltas]], optimizer.scales()["default"], started


def main(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    eager, scale, _ = course("eager", mesh)
    found, found_scale, started = course("triton", mesh)
    assert all(isinstance(t, torch.Tensor) and not isinstance(t, DTensor) for t in found)
    worst = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(eager, found, strict=True))
    assert worst <= 1e-6, worst
    assert scale > 0
    assert abs(scale - found_scale) <= 1e-6 * scale
    assert started == ["five_sums", "add", "tune", "step"]
    eager, found = (course(kernels, mesh, "int8")[0] for kernels in ("eager", "triton"))
    assert all(torch.equal(a, b) for a, b in zip(eager[len(SHAPES) :], found[len(SHAPES) :], strict=True))  # codes
    worst = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(eager, found, strict=True))
    assert worst <= 1e-6, worst
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
