"""Delta in bfloat16 and int8 over processes: what the ranks of test_parallel_storage.py do."""

import copy

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mechanic.torch import Mechanic
from mechanic.torch.buckets import decoded
from tests.torch import parallel

STEPS = 20


class Model(parallel.Model):
    """With a weight of several blocks, cut where no block ends."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(13, 45)
        self.narrow = nn.Linear(45, 3)

    def forward(self, inputs):
        return super().forward(inputs) + self.narrow(torch.tanh(self.wide(inputs)))


def wrap(model, delta):
    return Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0), delta=delta)


def build(layout, delta):
    from torch.distributed.fsdp import fully_shard

    model = Model()
    if layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if layout == "hsdp":  # both ranks hold everything, in DTensors
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model, wrap(model, delta)


def deltas(model, optimizer):
    """Decoded and whole."""
    found = {}
    for name, p in model.named_parameters():
        delta = decoded(optimizer.state[p])["mechanic_delta"]
        found[name.removeprefix("module.")] = parallel.whole(delta).double()
    return found


def codes(optimizer):
    """All bits of what this rank keeps of Delta."""
    entries = [
        state[key].to_local() if hasattr(state[key], "to_local") else state[key]
        for state in optimizer.state.values()
        for key in ("mechanic_delta", "mechanic_delta_scales")
        if key in state
    ]
    return torch.cat([entry.detach().contiguous().view(torch.uint8).flatten() for entry in entries])


def same_on_all_ranks(tensor):
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return all(tensor.equal(other) for other in gathered)


def train(layout, delta):
    model, optimizer = build(layout, delta)
    parallel.train(model, optimizer, STEPS)
    report = {
        "tuners agree": same_on_all_ranks(parallel.tuners_of(optimizer)),
        "dtypes": {str(state["mechanic_delta"].dtype) for state in optimizer.state.values()},
    }
    if layout != "fsdp2":
        report["codes agree"] = same_on_all_ranks(codes(optimizer))
        values = [parallel.whole(p.detach()).flatten() for p in model.parameters()]
        report["parameters agree"] = same_on_all_ranks(torch.cat(values))
    # From here on one process, which is given the same values and the same Delta.
    alone = Model()
    alone.load_state_dict(parallel.parameters(model))
    report["loss"] = parallel.loss_of(alone, 0, part=lambda t: t).item()
    other = wrap(alone, delta)
    state_dict = optimizer.state_dict()
    state = {
        key: {name: parallel.whole(value) for name, value in entry.items()}
        for key, entry in state_dict["state"].items()
    }
    other.load_state_dict(copy.deepcopy({**state_dict, "state": state}))
    before = deltas(model, optimizer), deltas(alone, other)
    scale = optimizer.scales()["default"]
    parallel.train(model, optimizer, 1, first=STEPS)
    parallel.train(alone, other, 1, first=STEPS, part=lambda t: t)
    sizes = {name: delta.abs().max() for name, delta in before[0].items()}
    found, expected = parallel.parameters(model), parallel.parameters(alone)
    after = deltas(model, optimizer), deltas(alone, other)
    report["Delta loaded"] = max(((before[0][n] - before[1][n]).abs().max() / sizes[n]).item() for n in sizes)
    report["Delta"] = max(((after[0][n] - after[1][n]).abs().max() / sizes[n]).item() for n in sizes)
    report["parameters"] = max(((found[n] - expected[n]).abs().max() / (scale * sizes[n])).item() for n in sizes)
    report["scales"] = abs(other.scales()["default"] / optimizer.scales()["default"] - 1)
    return report


def checkpoint_of(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    state = get_state_dict(model, optimizer)
    return {"model": state[0], "optimizer": state[1]}


def save(layout, delta, folder):
    """Save, then go on; the end and Delta at the time of saving are written beside it."""
    from torch.distributed import checkpoint as dcp

    model, optimizer = build(layout, delta)
    parallel.train(model, optimizer, STEPS)
    optimizer.zero_grad()
    path = f"{folder}/{layout} {delta} on {dist.get_world_size()}"
    dcp.save(checkpoint_of(model, optimizer), checkpoint_id=path)
    then = deltas(model, optimizer)
    parallel.train(model, optimizer, 5, first=STEPS)
    end = parallel.parameters(model)
    if dist.get_rank() == 0:
        torch.save({"then": then, "end": end}, f"{path}.pt")
    return {}


def resume(saved, ranks_then, delta_then, layout, delta, folder):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    path = f"{folder}/{saved} {delta_then} on {ranks_then}"
    expected = torch.load(f"{path}.pt")
    model, optimizer = build(layout, delta)
    state = checkpoint_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = deltas(model, optimizer)
    then = expected["then"]
    report = {"Delta": max(((found[n] - then[n]).abs().max() / then[n].abs().max()).item() for n in then)}
    parallel.train(model, optimizer, 5, first=STEPS)
    end = parallel.parameters(model)
    report["end"] = parallel.difference(end, expected["end"])
    report["bitwise"] = all(end[name].equal(value) for name, value in expected["end"].items())
    return report
