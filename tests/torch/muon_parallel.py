"""Muon over processes, and the same in one: the jobs of test_muon_parallel.py."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytorch_optimizer
import torch
from torch import distributed as dist
from torch import nn

from mechanic.torch import Mechanic, MechanicMuon, Together, roles
from tests.torch import parallel
from tests.torch.parallel import assert_follows, everything, message_of, parameters, placed

STEPS = 6
SAVED_AFTER = 3


class Model(nn.Module):
    """Matrices that are wide and tall, with rows that do not divide evenly; 5 rows leave the last of 4 ranks none."""

    def __init__(self, narrow=5):
        super().__init__()
        torch.manual_seed(0)
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


def follow(layout, make, *, is_exact=True):
    """``make`` makes the optimizer of a model."""
    runs = []
    with exact() if is_exact else nullcontext():
        for where in ("alone", layout):
            model, part = placed(where, Model())
            optimizer = make(model)
            parallel.train(model, optimizer, STEPS, part=part)
            runs.append((parameters(model), optimizer.scales()))
    # Sums in another order change the last of bfloat16's digits, which is the third.
    assert_follows(runs[1][0], optimizer, runs[0], within=1e-5 if is_exact else 0.01)


with_a_tuner_per_role = partial(MechanicMuon, tuners="role")


def split(model):
    """The matrices that Muon takes, and the rest."""
    found = roles(model)
    rest = [p for role, named in found.items() if role != "matrix" for p in named.values()]
    return list(found["matrix"].values()), rest


def groups_for(model):
    """As most other Muons take them, which have an AdamW of their own."""
    return [
        {"params": params, "use_muon": of_muon} for params, of_muon in zip(split(model), (True, False), strict=True)
    ]


def another(name, model):
    """A Muon of pytorch_optimizer's."""
    return Mechanic(getattr(pytorch_optimizer, name)([{**group, "lr": 1.0} for group in groups_for(model)]))


def of_each_alone():
    """Muon on what a rank holds would be far from Muon on whole matrices."""
    with exact():
        moved = []
        for layout in ("alone", "fsdp2"):
            model, part = placed(layout, Model())
            matrix, start = model.first.weight, parameters(model)["first.weight"]
            parallel.loss_of(model, 0, part).backward()
            if hasattr(matrix, "to_local"):
                local = nn.Parameter(matrix.to_local().detach().clone())
                local.grad = matrix.grad.to_local()
                torch.optim.Muon([local], lr=0.1).step()
                matrix.to_local().data.copy_(local.data)
            else:
                torch.optim.Muon([matrix], lr=0.1).step()
            moved.append(parameters(model)["first.weight"] - start)
    assert (moved[1] - moved[0]).norm() > 0.1 * moved[0].norm()


def one_collective_more_than_muon_which_takes_many(layout):
    counts = []
    for wrap in (lambda bare: bare, Mechanic):
        model, part = placed(layout, Model())
        matrices, rest = split(model)
        optimizer = wrap(Together(torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)))
        parallel.train(model, optimizer, 2, part=part)
        counts.append(parallel.collectives_of_a_step(model, optimizer, part))
    assert counts[1] - counts[0] == 1
    assert layout != "fsdp2" or counts[0] > 10 * len(matrices)


def build(kind, layout):
    model, part = placed(layout, Model())
    return model, with_a_tuner_per_role(model), part


def save(layout, folder):
    with exact():
        parallel.save("Muon", layout, folder, build=build, steps=SAVED_AFTER)


def resume(layout, ranks, into, folder):
    with exact():
        saved = "Muon", layout, ranks
        parallel.resume(saved, "Muon", into, folder, within=1e-5, build=build, steps=SAVED_AFTER)


def zero_redundancy():
    """ZeroRedundancyOptimizer gives every rank other parameters, but whole ones."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with exact():
        plain = Model()
        together = Mechanic(torch.optim.Muon([p for p in plain.parameters() if p.ndim == 2], lr=1.0))
        parallel.train(plain, together, STEPS, part=everything)
        model = nn.parallel.DistributedDataParallel(Model())
        sharded = ZeroRedundancyOptimizer(
            [p for p in model.parameters() if p.ndim == 2],
            lambda params, **options: Mechanic(torch.optim.Muon(params, **options), process_group=dist.group.WORLD),
            lr=1.0,
        )
        parallel.train(model, sharded, STEPS)
    assert_follows(parameters(model), sharded.optim, (parameters(plain), together.scales()), within=1e-5)


def flat_parts_are_refused_before_anything_has_changed():
    """Under FSDP1, when the optimizer is built, and if it was built before, when it steps."""
    for use_orig_params in (True, False):
        model = parallel.flat(Model(), use_orig_params=use_orig_params)
        assert "fully_shard" in message_of(lambda m=model: MechanicMuon(m, process_group=dist.group.WORLD))
    model = Model()
    muon = torch.optim.Muon([model.first.weight, model.second.weight], lr=1.0)
    optimizer = Mechanic(Together(muon, torch.optim.AdamW(model.head.parameters())), process_group=dist.group.WORLD)
    model = parallel.flat(model, use_orig_params=True)
    parallel.loss_of(model, 0).backward()
    before = [p.detach().clone() for p in model.parameters()]
    assert "fully_shard" in message_of(optimizer.step)
    assert all(p.equal(was) for p, was in zip(model.parameters(), before, strict=True))
    assert not optimizer.state


def fewer_rows_than_ranks_are_refused_by_their_shape_before_anything_has_changed():
    """torch's Muon fails halfway, with some parameters moved."""
    model, part = placed("fsdp2", Model(narrow=3))
    optimizer = Mechanic(torch.optim.Muon([model.first.weight, model.narrow.weight], lr=1.0))
    parallel.loss_of(model, 0, part).backward()
    assert "here one of shape (3, 7)" in message_of(optimizer.step)
    assert not optimizer.state
    optimizer = MechanicMuon(model, roles={"narrow.weight": "vector"})
    parallel.train(model, optimizer, 3, part=part)
    assert optimizer.scales()["default"] > 0
