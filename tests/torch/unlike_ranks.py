"""Ranks that do not do the same: what they do for test_unlike_ranks.py. Each job returns what all ranks found."""

import copy
import functools
import pickle
import warnings

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

from mechanic.torch import Mechanic, layer_groups


def of_all_ranks(found):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return gathered


def sharded():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    return (model(torch.randn(16, 6, generator=generator)) - 1).square().mean()


def tuners_in_another_order():
    model = sharded()
    groups = layer_groups(model)
    optimizer = Mechanic(AdamW(groups[::-1] if dist.get_rank() else groups, lr=1.0))
    loss_of(model, 0).backward()
    try:
        optimizer.step()
    except ValueError as error:
        return of_all_ranks(str(error))
    return of_all_ranks("")


def another_number_of_tuners():
    model = sharded()
    params = layer_groups(model) if dist.get_rank() else model.parameters()
    optimizer = Mechanic(AdamW(params, lr=1.0))
    loss_of(model, 0).backward()
    try:
        optimizer.step()
    except ValueError as error:
        return of_all_ranks(str(error))
    return of_all_ranks("")


def observed_without_reducing(how):
    """Held-out gradients under DDP that are of one rank only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    replicated = nn.parallel.DistributedDataParallel(model)
    optimizer = Mechanic(AdamW(model.parameters(), lr=1.0))
    for step in range(20):
        held_out = 1000 * (1 + dist.get_rank()) + step
        if how == "through the module":
            loss_of(model, held_out).backward()
        else:
            with replicated.no_sync():
                loss_of(replicated, held_out).backward()
        optimizer.observe()
        loss_of(replicated, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    return of_all_ranks((optimizer.scales()["default"], values.tolist()))


def read_on_one_rank():
    """Between backward() and step(), under step_in_backward()."""
    model = sharded()
    optimizer = Mechanic(AdamW(model.parameters(), lr=1.0))
    optimizer.step_in_backward()
    refused = 0
    for step in range(6):
        loss_of(model, step).backward()
        if dist.get_rank() == 0:
            refused += is_refused(optimizer.state_dict) + is_refused(functools.partial(pickle.dumps, optimizer))
        optimizer.step()
    return of_all_ranks((refused, optimizer.scales()["default"]))


def is_refused(read):
    try:
        read()
    except RuntimeError as error:
        return "between backward() and step()" in str(error)
    return False


def built_before_sharding():
    """As bare, it trains nothing; it says so."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(6, 2)
    optimizer = Mechanic(AdamW(model.parameters(), lr=1.0))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(12):
            loss_of(model, step).backward()
            optimizer.step()
    return of_all_ranks([str(each.message) for each in said if "fully_shard" in str(each.message)])


def copied_with_a_process_group():
    model = nn.Linear(6, 2)
    optimizer = Mechanic(AdamW(model.parameters(), lr=1.0), process_group=dist.group.WORLD)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
    pair, scales = (model, optimizer), []
    for twin, other in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        other.zero_grad()
        loss_of(twin, 3).backward()
        other.step()
        scales.append(other.scales()["default"])
    return of_all_ranks(scales)
