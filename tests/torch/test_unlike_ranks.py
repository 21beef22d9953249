"""Ranks that do not do the same are told, or do no harm. Two real processes, on gloo."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

from mechanic.torch import Mechanic, layer_groups
from tests.torch.parallel import message_of, of_all_ranks, run

pytestmark = pytest.mark.long


def make(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def shard(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    return (model(torch.randn(16, 6, generator=generator)) - 1).square().mean()


def other_tuners_are_refused_on_all_ranks(groups_of):
    model = shard(make())
    optimizer = Mechanic(AdamW(groups_of(model, dist.get_rank()), lr=1.0))
    loss_of(model, 0).backward()
    for message in of_all_ranks(message_of(optimizer.step)):
        assert "the ranks have different tuners, or have them in another order" in message


def in_another_order(model, rank):
    return layer_groups(model)[:: -1 if rank else 1]


def of_another_number(model, rank):
    return layer_groups(model) if rank else model.parameters()


def replicas_stay_the_same_if_observed_gradients_were_not_reduced(through):
    """Held-out gradients under DDP that are of one rank only."""
    model = make(outputs=1)
    replicated = nn.parallel.DistributedDataParallel(model)
    optimizer = Mechanic(AdamW(model.parameters(), lr=1.0))
    for step in range(20):
        held_out = 1000 * (1 + dist.get_rank()) + step
        if through == "the module":
            loss_of(model, held_out).backward()
        else:
            with replicated.no_sync():
                loss_of(replicated, held_out).backward()
        optimizer.observe()
        loss_of(replicated, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    first, second = of_all_ranks((optimizer.scales()["default"], values))
    assert first == second
    assert first[0] > 0


def reading_on_one_rank_between_backward_and_step_is_refused_and_changes_nothing():
    model = shard(make())
    optimizer = Mechanic(AdamW(model.parameters(), lr=1.0))
    optimizer.step_in_backward()
    for step in range(6):
        loss_of(model, step).backward()
        if dist.get_rank() == 0:
            for read in (optimizer.state_dict, functools.partial(pickle.dumps, optimizer)):
                with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
                    read()
        optimizer.step()
    first, second = of_all_ranks(optimizer.scales()["default"])
    assert first == second > 0


def an_optimizer_that_was_built_before_sharding_says_so():
    """As bare, it trains nothing."""
    model = make()
    optimizer = Mechanic(AdamW(model.parameters(), lr=1.0))
    shard(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(12):
            loss_of(model, step).backward()
            optimizer.step()
    for messages in of_all_ranks([str(each.message) for each in said if "fully_shard" in str(each.message)]):
        assert len(messages) == 1
        assert "Build the optimizer after fully_shard" in messages[0]


def copies_of_an_optimizer_with_a_process_group_go_on():
    model = make()
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
    assert len({scale for of_rank in of_all_ranks(scales) for scale in of_rank}) == 1
    assert scales[0] > 0


def test_unlike_ranks_are_told_or_do_no_harm(tmp_path):
    jobs = [
        functools.partial(other_tuners_are_refused_on_all_ranks, in_another_order),
        functools.partial(other_tuners_are_refused_on_all_ranks, of_another_number),
        *(
            functools.partial(replicas_stay_the_same_if_observed_gradients_were_not_reduced, through)
            for through in ("the module", "no_sync")
        ),
        reading_on_one_rank_between_backward_and_step_is_refused_and_changes_nothing,
        an_optimizer_that_was_built_before_sharding_says_so,
        copies_of_an_optimizer_with_a_process_group_go_on,
    ]
    run(2, tmp_path / "run", jobs)
