"""bfloat16 parameters over processes: what the ranks of test_parallel_half.py do."""

import copy

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mechanic.torch import Mechanic
from tests.torch import parallel, parallel_storage

STEPS = 12


def everything(tensor):
    """Every rank sees the whole batch, so its gradient has the bits of one process."""
    return tensor


def loss_of(model, step):
    inputs, targets = parallel.batch(step)
    return (model(inputs.bfloat16()).float() - targets).square().mean()


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def build(layout, base="AdamW", **options):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = parallel_storage.Model().bfloat16()
    if layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    if layout == "offload":
        policy = CPUOffloadPolicy(pin_memory=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), offload_policy=policy)
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    if layout == "tp":
        parallel.parallelize(model, init_device_mesh("cpu", (ranks,)))
    if base == "Muon":
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return model, Mechanic(torch.optim.Muon(matrices, lr=1.0), **options)
    cls, arguments = parallel.BASES[base]
    return model, Mechanic(cls(model.parameters(), **arguments), **options)


def ulps(found, expected):
    """The largest distance in units of the last place, which for bfloat16 are steps of its bits."""
    distances = []
    for name, value in expected.items():
        a, b = (ordered_bits(each) for each in (found[name], value))
        distances.append((a - b).abs().max().item())
    return max(distances)


def ordered_bits(tensor):
    bits = tensor.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def compare(layout, base, delta):
    alone_model, alone = build("alone", base, delta=delta)
    train(alone_model, alone, STEPS)
    model, optimizer = build(layout, base, delta=delta)
    train(model, optimizer, STEPS)
    scale, expected = optimizer.scales()["default"], alone.scales()["default"]
    found = parallel.parameters(model)
    trained = {name: p.detach() for name, p in alone_model.named_parameters() if p in alone.state}
    kept = {p.to_local().device.type for p in optimizer.state if hasattr(p, "to_local")}
    return {
        "ulps": ulps(found, trained),
        "relative": parallel.difference(found, trained),
        "scales": abs(scale / expected - 1),
        "same on all ranks": parallel_storage.same_on_all_ranks(parallel.tuners_of(optimizer)),
        "dtypes": {str(value.dtype) for state in optimizer.state.values() for value in state.values() if value.ndim},
        "on": kept,
        "parameters are": {str(p.dtype) for p in model.parameters()},
    }


def life(delta):
    """Freezing, a copy, a base that fails, and release, each on shards."""
    model, optimizer = build("fsdp2", delta=delta)
    train(model, optimizer, STEPS)
    twin = copy.deepcopy(optimizer.state_dict())
    before = parallel.parameters(model)
    loss_of(model, STEPS).backward()
    report = {}
    step = torch.optim.AdamW.step

    def fail(self, closure=None):
        step(self)
        raise MemoryError

    torch.optim.AdamW.step = fail
    try:
        optimizer.step()
    except MemoryError:
        after = parallel.parameters(model)
        report["fails"] = all(after[name].equal(value) for name, value in before.items())
    finally:
        torch.optim.AdamW.step = step
    optimizer.load_state_dict(twin)
    optimizer.freeze()
    train(model, optimizer, 2, first=STEPS)
    base = optimizer.release()
    train(model, base, 2, first=STEPS + 2)
    report["released"] = {str(value.dtype) for state in base.state.values() for value in state.values() if value.ndim}
    report["finite"] = all(p.isfinite().all().item() for p in parallel.parameters(model).values())
    return report


def save(delta, folder):
    from torch.distributed import checkpoint as dcp

    model, optimizer = build("fsdp2", delta=delta)
    train(model, optimizer, STEPS)
    optimizer.zero_grad()
    path = f"{folder}/{delta} on {dist.get_world_size()}"
    dcp.save(parallel_storage.checkpoint_of(model, optimizer), checkpoint_id=path)
    train(model, optimizer, 3, first=STEPS)
    end = parallel.parameters(model)
    if dist.get_rank() == 0:
        torch.save({"end": end, "scale": optimizer.scales()["default"]}, f"{path}.pt")
    return {}


def resume(ranks_then, delta, folder):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    path = f"{folder}/{delta} on {ranks_then}"
    expected = torch.load(f"{path}.pt")
    model, optimizer = build("fsdp2", delta=delta)
    state = parallel_storage.checkpoint_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, 3, first=STEPS)
    end = parallel.parameters(model)
    return {
        "ulps": ulps(end, expected["end"]),
        "relative": parallel.difference(end, expected["end"]),
        "scales": abs(optimizer.scales()["default"] / expected["scale"] - 1),
    }
