"""Stepping inside the backward pass over processes: what the ranks of test_step_in_backward.py do."""

import copy
import functools

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mechanic.torch import Mechanic, backward
from tests.torch import parallel

STEPS = 20


def wrap(model, base, per_group, **options):
    backward.WAITING = 1 if per_group else 100  # these parameters are small
    optimizer = parallel.wrap(model, base, per_group, **options)
    optimizer.step_in_backward()
    return optimizer


@functools.cache
def alone(base, per_group):
    """The same run in one process."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = parallel.Model()
    optimizer = wrap(model, base, per_group, process_group=group)
    parallel.train(model, optimizer, STEPS, part=lambda tensor: tensor)
    return parallel.parameters(model), optimizer.scales()


def sharded(layout):
    from torch.distributed.fsdp import fully_shard

    model = parallel.Model()
    if layout == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
    else:  # both ranks hold everything, in DTensors
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def compared(model, optimizer, base, per_group, part=parallel.share):
    from torch.distributed.tensor.debug import CommDebugMode

    left = []
    after = lambda step: left.extend(p for p in model.parameters() if p.grad is not None)  # noqa: E731
    parallel.train(model, optimizer, STEPS - 1, part=part, after_backward=after)
    parallel.loss_of(model, STEPS - 1, part).backward()
    with CommDebugMode() as mode:
        optimizer.step()
    expected, tuners = alone(base, per_group), parallel.tuners_of(optimizer)
    report = parallel.report(parallel.parameters(model), optimizer.scales(), expected, tuners)
    return {**report, "gradients left": len(left), "collectives of a step": mode.get_total_counts()}


def fsdp2(base, per_group):
    model = sharded("fsdp2")
    return compared(model, wrap(model, base, per_group), base, per_group)


def hsdp(base, per_group):
    model = sharded("hsdp")
    return compared(model, wrap(model, base, per_group), base, per_group)


def tensor_parallel(base, per_group):
    model = parallel.parallelize(parallel.Model(), init_device_mesh("cpu", (2,)))
    return compared(model, wrap(model, base, per_group), base, per_group, part=lambda tensor: tensor)


def refusal_of(model, **options):
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0), **options)
    try:
        optimizer.step_in_backward()
    except ValueError as error:
        return {"refused": str(error)}
    return {"refused": ""}


def ddp():
    return refusal_of(nn.parallel.DistributedDataParallel(parallel.Model()))


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(parallel.Model(), use_orig_params=True, device_id=torch.device("cpu"))
    return refusal_of(model, process_group=dist.group.WORLD)


def one_bad_rank():
    """A gradient that is not finite on one rank only: nobody tunes, and nothing of it reaches the parameters."""
    model = sharded("fsdp2")
    optimizer = parallel.wrap(model, "AdamW", False)

    def spoil(p):
        if bad and dist.get_rank() == 1:
            p.grad._local_tensor[0, 0] = float("nan")

    bad = False
    model.first.weight.register_post_accumulate_grad_hook(spoil)
    optimizer.step_in_backward()
    parallel.train(model, optimizer, 5)
    before = parallel.learned(optimizer)
    bad = True
    parallel.train(model, optimizer, 1, first=5)
    kept = parallel.learned(optimizer).equal(before)
    bad = False
    parallel.train(model, optimizer, 5, first=6)
    return {
        "tuner kept": kept,
        "counted": optimizer.nonfinite_steps == 1,
        "finite": all(p.isfinite().all().item() for p in parallel.parameters(model).values()),
    }


def resume():
    model = sharded("fsdp2")
    optimizer = wrap(model, "AdamW", True)
    parallel.train(model, optimizer, 10)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    parallel.train(model, optimizer, 5, first=10)
    twin = sharded("fsdp2")
    other = wrap(twin, "AdamW", True)
    twin.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    parallel.train(twin, other, 5, first=10)
    pairs = zip(parallel.parameters(model).values(), parallel.parameters(twin).values(), strict=True)
    return {"bitwise": all(a.equal(b) for a, b in pairs)}


JOBS = [
    *((fsdp2, (base, per_group)) for base in parallel.BASES for per_group in (False, True)),
    *((case, ("AdamW", True)) for case in (hsdp, tensor_parallel)),
    *((case, ()) for case in (ddp, fsdp1, one_bad_rank, resume)),
]
