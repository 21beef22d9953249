"""Muon over processes, and the same in one: what the ranks of test_muon_parallel.py do."""

from contextlib import contextmanager

import pytorch_optimizer
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

from mechanic.torch import Mechanic, MechanicMuon, Together, roles
from tests.torch import parallel
from tests.torch.parallel import parameters, placed, report, tuners_of
from tests.torch.task import same_bits, snapshot

STEPS = 6
SAVED_AFTER = 3


class Model(nn.Module):
    """Matrices that are wide and tall, with rows that do not divide evenly; 5 rows leave the last of 4 ranks none."""

    def __init__(self, seed=0, narrow=5):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(13, 12), nn.Linear(12, 7)
        self.narrow, self.wide = nn.Linear(7, narrow), nn.Linear(narrow, 11)
        self.head = nn.Linear(11, 3)

    def forward(self, inputs):
        hidden = inputs
        for layer in (self.first, self.second, self.narrow, self.wide):
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


@contextmanager
def exact():
    """Newton-Schulz in float64. In bfloat16, where torch does it, sums in another order change its second digit."""
    bfloat16 = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda tensor: tensor.to(torch.float64, copy=True)  # it is changed in place
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = bfloat16


def train(model, optimizer, part=lambda tensor: tensor, steps=STEPS, first=0):
    parallel.train(model, optimizer, steps, first, part)


def alone(tuners):
    """The same run in one process: the parameters, and S of every tuner."""
    model = Model()
    optimizer = MechanicMuon(model, tuners=tuners)
    train(model, optimizer)
    return parameters(model), optimizer.scales()


def follow(layout, tuners):
    expected = alone(tuners)
    model, part = placed(layout, Model())
    optimizer = MechanicMuon(model, tuners=tuners)
    train(model, optimizer, part)
    return report(parameters(model), optimizer.scales(), expected, tuners_of(optimizer))


def follow_exactly(layout, tuners):
    with exact():
        return follow(layout, tuners)


def groups_for(model):
    """As most other Muons take them, which have an AdamW of their own."""
    found = roles(model)
    rest = [p for role, named in found.items() if role != "matrix" for p in named.values()]
    return [{"params": list(found["matrix"].values()), "use_muon": True}, {"params": rest, "use_muon": False}]


def follow_with_another(layout, name):
    """With a Muon of pytorch_optimizer's."""
    with exact():
        runs = []
        for model, part in ((Model(), lambda tensor: tensor), placed(layout, Model())):
            groups = [{**group, "lr": 1.0} for group in groups_for(model)]
            optimizer = Mechanic(getattr(pytorch_optimizer, name)(groups))
            train(model, optimizer, part)
            runs.append((parameters(model), optimizer.scales()))
    return report(*runs[1], runs[0], tuners_of(optimizer))


def of_each_alone(layout):
    """How far Muon on what a rank holds would be from Muon on whole matrices, after one step at lr = 0.1."""
    with exact():
        moved = []
        for model, part in ((Model(), lambda tensor: tensor), placed(layout, Model())):
            matrix = model.first.weight
            parallel.loss_of(model, 0, part).backward()
            if hasattr(matrix, "to_local"):
                local = nn.Parameter(matrix.to_local().detach().clone())
                local.grad = matrix.grad.to_local()
                torch.optim.Muon([local], lr=0.1).step()
                matrix.to_local().data.copy_(local.data)
            else:
                torch.optim.Muon([matrix], lr=0.1).step()
            moved.append(parameters(model)["first.weight"] - parameters(Model())["first.weight"])
    return {"off": ((moved[1] - moved[0]).norm() / moved[0].norm()).item()}


def collectives(layout):
    """How many a step takes per matrix without Mechanic, and how many more with it."""
    from torch.distributed.tensor.debug import CommDebugMode

    counts = []
    for wrap in (lambda bare: bare, Mechanic):
        model, part = placed(layout, Model())
        found = roles(model)
        matrices = list(found["matrix"].values())
        rest = [p for role, named in found.items() if role != "matrix" for p in named.values()]
        optimizer = wrap(Together(torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)))
        train(model, optimizer, part, 2)
        parallel.loss_of(model, 2, part).backward()
        with CommDebugMode() as mode:
            optimizer.step()
        counts.append(mode.get_total_counts())
    return {"ours": counts[1] - counts[0], "per matrix": counts[0] / len(matrices)}


def save(layout, folder):
    with exact():
        model, part = placed(layout, Model())
        optimizer = MechanicMuon(model, tuners="role")
        train(model, optimizer, part, SAVED_AFTER)
    optimizer.zero_grad()
    dcp.save(parallel.checkpoint_of(model, optimizer), checkpoint_id=_path(folder, layout))
    return {}


def resume(saved, ranks_then, layout, folder):
    with exact():
        model, part = placed(layout, Model(seed=1))
        optimizer = MechanicMuon(model, tuners="role")
        parallel.load(model, optimizer, _path(folder, saved, ranks_then))
        train(model, optimizer, part, STEPS - SAVED_AFTER, first=SAVED_AFTER)
        return report(parameters(model), optimizer.scales(), alone("role"), tuners_of(optimizer))


def resume_bitwise(layout, folder):
    path = f"{folder}/bitwise {layout}"
    model, part = placed(layout, Model())
    optimizer = MechanicMuon(model)
    train(model, optimizer, part, 2)
    dcp.save(parallel.checkpoint_of(model, optimizer), checkpoint_id=path)
    again, part = placed(layout, Model(seed=1))
    resumed = MechanicMuon(again, lr=3.0)
    parallel.load(again, resumed, path)
    for each, other in ((model, optimizer), (again, resumed)):
        train(each, other, part, 2, first=2)
    return {"same": _on_all(same_bits(snapshot(model, optimizer), snapshot(again, resumed)))}


def zero_redundancy():
    """ZeroRedundancyOptimizer gives every rank other parameters, but whole ones."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with exact():
        plain = Model()
        matrices = [p for p in plain.parameters() if p.ndim == 2]
        together = Mechanic(torch.optim.Muon(matrices, lr=1.0))
        train(plain, together)
        model = nn.parallel.DistributedDataParallel(Model())
        sharded = ZeroRedundancyOptimizer(
            [p for p in model.parameters() if p.ndim == 2],
            lambda params, **options: Mechanic(torch.optim.Muon(params, **options), process_group=dist.group.WORLD),
            lr=1.0,
        )
        train(model, sharded, parallel.share)
    inner = sharded.optim
    return report(parameters(model), inner.scales(), (parameters(plain), together.scales()), tuners_of(inner))


def refused_under_fsdp1(use_orig_params):
    """What is said when the optimizer is built, and when it was built before and steps."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrap(model):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)

    said = {"built": _message_of(lambda: MechanicMuon(wrap(Model()), process_group=dist.group.WORLD))}
    if use_orig_params:
        model = Model()
        muon = torch.optim.Muon([model.first.weight, model.second.weight], lr=1.0)
        optimizer = Mechanic(Together(muon, torch.optim.AdamW(model.head.parameters())), process_group=dist.group.WORLD)
        model = wrap(model)
        parallel.loss_of(model, 0).backward()
        before = [p.detach().clone() for p in model.parameters()]
        said["stepped"] = _message_of(optimizer.step)
        kept = all(p.equal(was) for p, was in zip(model.parameters(), before, strict=True))
        said["nothing changed"] = _on_all(kept and not optimizer.state)
    return said


def refused_with_too_few_rows(layout):
    """More ranks than rows: torch's Muon fails halfway, with some parameters moved."""
    model, part = placed(layout, Model(narrow=3))
    bare = torch.optim.Muon([model.first.weight, model.narrow.weight], lr=1.0)
    optimizer = Mechanic(bare)
    parallel.loss_of(model, 0, part).backward()
    said = {"stepped": _message_of(optimizer.step), "nothing changed": _on_all(not optimizer.state)}
    optimizer = MechanicMuon(model, roles={"narrow.weight": "vector"})
    train(model, optimizer, part, 3)
    said["with the remedy"] = _on_all(optimizer.scales()["default"] > 0)
    return said


def _message_of(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def _on_all(flag):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, flag)
    return all(gathered)


def _path(folder, layout, ranks=None):
    return f"{folder}/{layout} on {ranks or dist.get_world_size()}"
