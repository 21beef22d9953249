"""Training over processes, and the same in one: what the ranks of test_parallel.py do.

One spawn per number of ranks; rank 0 writes what every case found into a file.
"""

import functools
import multiprocessing
import os
import time
import traceback
import warnings
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mechanic.torch import Mechanic, mechanic_class
from tests.torch.task import learned

STEPS = 60
BATCH = 12  # divisible by 2, 3 and 4
BASES = {
    "AdamW": (torch.optim.AdamW, {"lr": 1.0, "weight_decay": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}),
}


class Model(nn.Module):
    """Odd sizes, a parameter of one element, and more ranks than rows somewhere."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(13, 12)
        self.second = nn.Linear(12, 3)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(inputs))) * self.gain


def batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 13, generator=generator)
    return inputs, torch.sin(inputs[:, :3])


def share(tensor):
    """This rank's part of a batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else tensor


def loss_of(model, step, part=share):
    inputs, targets = (part(tensor) for tensor in batch(step))
    return (model(inputs) - targets).square().mean()


def param_groups(model, per_group):
    if not per_group:
        return list(model.parameters())
    first = [p for name, p in model.named_parameters() if "first" in name]
    rest = [p for name, p in model.named_parameters() if "first" not in name]
    return [{"params": first, "tuner": "first"}, {"params": rest, "tuner": "rest"}]


def wrap(model, base, per_group, **options):
    cls, arguments = BASES[base]
    return Mechanic(cls(param_groups(model, per_group), **arguments), **options)


def train(model, optimizer, steps=STEPS, first=0, part=share, after_backward=lambda step: None):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step, part).backward()
        after_backward(step)
        optimizer.step()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def parameters(model):
    return {name.removeprefix("module."): whole(p.detach()).clone() for name, p in model.named_parameters()}


@functools.cache
def alone(base, per_group, steps=STEPS):
    """The same run in one process: the parameters, and S of every tuner."""
    model = Model()
    optimizer = wrap(model, base, per_group)
    train(model, optimizer, steps, part=lambda tensor: tensor)
    return parameters(model), optimizer.scales()


def difference(found, expected):
    """The distance of two models, relative to the norm of the second."""
    names = sorted(expected)
    a, b = (torch.cat([model[name].double().flatten() for name in names]) for model in (found, expected))
    return ((a - b).norm() / b.norm()).item()


def report(found, scales, expected, tuners):
    expected_parameters, expected_scales = expected
    gathered = [torch.empty_like(tuners) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tuners)
    return {
        "parameters": difference(found, expected_parameters),
        "scales": max(abs(scales[name] - s) / s for name, s in expected_scales.items()),
        "same on all ranks": all(tuners.equal(other) for other in gathered),
    }


def tuners_of(optimizer):
    return torch.cat([group["mechanic_tuner"].flatten() for group in optimizer.param_groups])


def compare(model, optimizer, base, per_group):
    train(model, optimizer)
    return report(parameters(model), optimizer.scales(), alone(base, per_group), tuners_of(optimizer))


# Layouts. Each takes a base and whether to tune groups apart, and returns a report.


def ddp(base, per_group):
    model = nn.parallel.DistributedDataParallel(Model())
    return compare(model, wrap(model, base, per_group), base, per_group)


def fsdp2(base, per_group, **options):
    from torch.distributed.fsdp import fully_shard

    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return compare(model, wrap(model, base, per_group), base, per_group)


def fsdp2_offload(base, per_group):
    from torch.distributed.fsdp import CPUOffloadPolicy

    return fsdp2(base, per_group, offload_policy=CPUOffloadPolicy(pin_memory=False))


def hsdp(base, per_group):
    from torch.distributed.fsdp import fully_shard

    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return compare(model, wrap(model, base, per_group), base, per_group)


def parallelize(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def tensor_parallel(base, per_group):
    model = parallelize(Model(), init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = wrap(model, base, per_group)
    train(model, optimizer, part=lambda tensor: tensor)
    return report(parameters(model), optimizer.scales(), alone(base, per_group), tuners_of(optimizer))


class NormedModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = nn.LayerNorm(12), nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(self.norm(inputs))))


def sequence_parallel(base, per_group):
    """Autograd leaves the norm's gradients as partial sums, one per rank."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    models = NormedModel(), NormedModel()
    layouts = {
        "norm": SequenceParallel(),
        "first": ColwiseParallel(input_layouts=Shard(1)),
        "second": RowwiseParallel(),
    }
    parallelize_module(models[1], init_device_mesh("cpu", (2,)), layouts)
    optimizers = [wrap(model, base, per_group) for model in models]
    for step in range(STEPS):
        inputs = torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(step))
        own = inputs.chunk(2, dim=1)[dist.get_rank()]
        for model, optimizer, part in zip(models, optimizers, (inputs, own), strict=True):
            optimizer.zero_grad()
            (model(part) - torch.sin(inputs[..., :3])).square().mean().backward()
            optimizer.step()
    expected = parameters(models[0]), optimizers[0].scales()
    return report(parameters(models[1]), optimizers[1].scales(), expected, tuners_of(optimizers[1]))


def tensor_parallel_fsdp2(base, per_group):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(Model(), mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = wrap(model, base, per_group)
    half = mesh["dp"].get_local_rank()
    train(model, optimizer, part=lambda tensor: tensor.chunk(2)[half])
    return report(parameters(model), optimizer.scales(), alone(base, per_group), tuners_of(optimizer))


def two_meshes(base, per_group):
    """As experts are laid out: some parameters over all ranks, some over half of them and twice."""
    from torch.distributed.fsdp import fully_shard

    model = Model()
    fully_shard(model.first, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return compare(model, wrap(model, base, per_group), base, per_group)


def fsdp1(base, per_group, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        Model(), device_id=torch.device("cpu"), use_orig_params=use_orig_params, process_group=dist.group.WORLD
    )
    groups_apart = per_group and use_orig_params
    optimizer = wrap(model, base, groups_apart, process_group=dist.group.WORLD)
    train(model, optimizer)
    with FullyShardedDataParallel.summon_full_params(model):
        found = {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}
    return report(found, optimizer.scales(), alone(base, groups_apart), tuners_of(optimizer))


def fsdp1_flat(base, per_group):
    return fsdp1(base, per_group, use_orig_params=False)


def fsdp1_orig(base, per_group):
    return fsdp1(base, per_group, use_orig_params=True)


def fsdp1_without_a_group(base, per_group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = wrap(model, base, per_group)
    try:
        train(model, optimizer, 1)
    except ValueError as error:
        return {"refused": str(error)}
    return {"refused": ""}


def zero_redundancy(base, per_group):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    cls, arguments = BASES[base]
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), functools.partial(_in_world, mechanic_class(cls)), **arguments
    )
    train(model, optimizer)
    inner = optimizer.optim
    return report(parameters(model), inner.scales(), alone(base, False), tuners_of(inner))


def _in_world(cls, params, **arguments):
    return Mechanic(cls.base_class(params, **arguments), process_group=dist.group.WORLD)


def lose_gradient(p, step):
    """Now and then a parameter has none."""
    if step % 3 == 1:
        p.grad = None


class _HalvedModel(Model):
    """The same model, the two halves of whose first weight are parameters of their own."""

    def __init__(self):
        super().__init__()
        weight = self.first.weight.detach()
        del self.first.weight
        self.first.halves = nn.ParameterList(half.clone() for half in weight.chunk(2))

    def forward(self, inputs):
        self.first.weight = torch.cat(list(self.first.halves))
        return super().forward(inputs)


def tensor_parallel_without_a_gradient(base, per_group):
    """The second rank loses the gradient of its half of a weight: as if that were a parameter of its own."""
    halved = _HalvedModel()
    together = wrap(halved, base, per_group)
    lower = halved.first.halves[1]
    train(halved, together, part=lambda tensor: tensor, after_backward=lambda step: lose_gradient(lower, step))
    expected = parameters(halved)
    expected["first.weight"] = torch.cat([expected.pop(f"first.halves.{half}") for half in range(2)])

    model = parallelize(Model(), init_device_mesh("cpu", (2,)))
    optimizer = wrap(model, base, per_group)

    def after_backward(step):
        if dist.get_rank() == 1:
            lose_gradient(model.first.weight, step)

    train(model, optimizer, part=lambda tensor: tensor, after_backward=after_backward)
    return report(parameters(model), optimizer.scales(), (expected, together.scales()), tuners_of(optimizer))


def pipeline_without_a_gradient(base, per_group):
    """A parameter of the second stage has no gradient now and then."""
    model = Model()
    together = wrap(model, base, per_group)
    second = model.second.weight
    train(model, together, part=lambda tensor: tensor, after_backward=lambda step: lose_gradient(second, step))
    return pipeline(base, per_group, (parameters(model), together.scales()), losing="second.weight")


def pipeline(base, per_group, expected=None, losing=None):
    """Other parameters on every rank: the user names the group to sum over."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, whole_model = dist.get_rank(), Model()
    stage_model = _FirstStage(whole_model) if rank == 0 else _SecondStage(whole_model)
    stage = PipelineStage(stage_model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    cls, arguments = BASES[base]
    # Tuners are told apart by name, and every rank has to know all of them in the same order.
    names = ("first", "rest")
    own = list(stage_model.parameters())
    groups = [{"params": own if rank == index else [], "tuner": name} for index, name in enumerate(names)]
    optimizer = Mechanic(cls(groups if per_group else own, **arguments), process_group=dist.group.WORLD)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        schedule.step(inputs) if rank == 0 else schedule.step(target=targets)
        if rank == 1 and losing:
            lose_gradient(stage_model.get_parameter(losing), step)
        optimizer.step()
    own_parameters = {name.removeprefix("model."): p.detach().clone() for name, p in stage_model.named_parameters()}
    stages = [None, None]
    dist.all_gather_object(stages, own_parameters)
    expected = expected or alone(base, per_group)
    return report(stages[0] | stages[1], optimizer.scales(), expected, tuners_of(optimizer))


class _FirstStage(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.first = model.first

    def forward(self, inputs):
        return torch.tanh(self.first(inputs))


class _SecondStage(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.second, self.gain = model.second, model.gain

    def forward(self, hidden):
        return self.second(hidden) * self.gain


def no_gradient_on_some_ranks(base, per_group):
    """Two plain models under a named group, of which the second rank's loses a gradient now and then."""
    rank = dist.get_rank()
    models = [Model(), Model()]
    for p in models[1].parameters():
        p.data.mul_(1.5)
    cls, arguments = BASES[base]

    def losses(step):
        return [loss_of(model, 2 * step + i, part=lambda tensor: tensor) for i, model in enumerate(models)]

    def drop(step):
        lose_gradient(models[1].second.weight, step)

    together = Mechanic(cls([p for model in models for p in model.parameters()], **arguments))
    for step in range(STEPS):
        together.zero_grad()
        sum(losses(step)).backward()
        drop(step)
        together.step()
    expected = parameters(models[rank]), together.scales()
    models[:] = [Model(), Model()]
    for p in models[1].parameters():
        p.data.mul_(1.5)
    apart = Mechanic(cls(models[rank].parameters(), **arguments), process_group=dist.group.WORLD)
    for step in range(STEPS):
        apart.zero_grad()
        losses(step)[rank].backward()
        drop(step)
        apart.step()
    return report(parameters(models[rank]), apart.scales(), expected, tuners_of(apart))


def observing(base, per_group):
    """Held-out feedback on every other step, under FSDP2: still one collective a step."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    def train_and_observe(model, optimizer, part):
        collectives = []
        for step in range(STEPS):
            mode = CommDebugMode()
            if step % 2:
                loss_of(model, 1000 + step, part).backward()
                with mode:
                    optimizer.observe()
            loss_of(model, step, part).backward()
            with mode:
                optimizer.step()
            optimizer.zero_grad()
            collectives.append(mode.get_total_counts())
        return collectives

    plain, sharded = Model(), fully_shard(Model())
    optimizers = [wrap(model, base, per_group) for model in (plain, sharded)]
    train_and_observe(plain, optimizers[0], lambda tensor: tensor)
    counts = train_and_observe(sharded, optimizers[1], share)
    assert counts[1:] == [1] * (STEPS - 1), counts  # in the first the ranks compare the names of their tuners
    expected = parameters(plain), optimizers[0].scales()
    return report(parameters(sharded), optimizers[1].scales(), expected, tuners_of(optimizers[1]))


def own_iterates(base, per_group):
    """The base steps on shards of iterates of its own."""
    from torch.distributed.fsdp import fully_shard

    plain, sharded = Model(), fully_shard(Model())
    optimizers = [wrap(model, base, per_group, own_iterates=True) for model in (plain, sharded)]
    train(plain, optimizers[0], part=lambda tensor: tensor)
    train(sharded, optimizers[1])
    expected = parameters(plain), optimizers[0].scales()
    return report(parameters(sharded), optimizers[1].scales(), expected, tuners_of(optimizers[1]))


def mixed_precision(base, per_group):
    """Beside the bare base at the learned rate: how far a bfloat16 forward leads each from its float32 run."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected, scales = alone(base, per_group)
    model = Model()
    fully_shard(model, mp_policy=policy)
    optimizer = wrap(model, base, per_group)
    train(model, optimizer)
    ours = difference(parameters(model), expected)
    cls, arguments = BASES[base]
    results = []
    for sharded in (False, True):
        model = Model()
        if sharded:
            fully_shard(model, mp_policy=policy)
        bare = cls(param_groups(model, per_group), **arguments)
        for group in bare.param_groups:
            group["lr"] = scales[group["tuner"]] if per_group else scales["default"]
        train(model, bare, part=share if sharded else lambda tensor: tensor)
        results.append(parameters(model))
    return {"ours": ours, "bare": difference(results[1], results[0])}


def collectives(base, per_group):
    """How many a step takes, bare and under Mechanic, and how many bytes the one more moves."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    counts = {}
    for layout in ("fsdp2", "ddp"):
        for name in ("bare", "ours"):
            model = nn.parallel.DistributedDataParallel(Model()) if layout == "ddp" else fully_shard(Model())
            cls, arguments = BASES[base]
            bare = cls(param_groups(model, per_group), **arguments)
            optimizer = bare if name == "bare" else Mechanic(bare)
            train(model, optimizer, 2)
            loss_of(model, 2).backward()
            with CommDebugMode() as mode:
                optimizer.step()
            counts[layout, name] = mode.get_total_counts()
    return counts


def one_bad_rank(base, per_group):
    """A gradient that is not finite on one rank only: all take the same decision."""
    from torch.distributed.fsdp import fully_shard

    found = {}
    for skip in (False, True):
        model = fully_shard(Model())
        optimizer = wrap(model, base, per_group, skip_nonfinite=skip)
        train(model, optimizer, 5)
        before = parameters(model), learned(optimizer)
        optimizer.zero_grad()
        loss_of(model, 5).backward()
        if dist.get_rank() == 1:
            model.first.weight.grad._local_tensor[0, 0] = float("nan")
        optimizer.step()
        after = parameters(model)
        found[f"tuners kept, skip={skip}"] = per_group or learned(optimizer).equal(before[1])
        found[f"finite, skip={skip}"] = all(p.isfinite().all().item() for p in after.values())
        if skip:
            found["parameters kept"] = all(after[name].equal(p) for name, p in before[0].items())
            found["skipped"] = optimizer.skipped_steps == 1
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return {"agree": all(other == found for other in gathered), **found}


# Checkpoints that reshard: saved on some ranks in some layout, continued on others.

SAVED_AFTER = 30


def placed(layout, model):
    """A model in a layout, and the part of a batch that this rank sees."""
    from torch.distributed.fsdp import fully_shard

    part = share
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif layout == "fsdp2":
        fully_shard(model)
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "tp":
        parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))

        def part(tensor):
            return tensor

    elif layout == "tp+fsdp2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        half = mesh["dp"].get_local_rank()

        def part(tensor):
            return tensor.chunk(2)[half]

    return model, part


def build(layout, base):
    model, part = placed(layout, Model())
    return model, wrap(model, base, per_group=True), part


def checkpoint_of(model, optimizer, flatten=False):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    parts = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    return dict(zip(("model", "optimizer"), parts, strict=True))


def save(layout, base, folder, flatten):
    from torch.distributed import checkpoint as dcp

    model, optimizer, part = build(layout, base)
    train(model, optimizer, SAVED_AFTER, part=part)
    optimizer.zero_grad()
    state, path = checkpoint_of(model, optimizer, flatten), _path(folder, layout, base, flatten)
    if layout == "fsdp2":
        dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, checkpoint_id=path)
    return {}


def resume(saved, ranks_then, layout, base, folder, flatten):
    model, optimizer, part = build(layout, base)
    load(model, optimizer, _path(folder, saved, base, flatten, ranks_then), flatten)
    train(model, optimizer, STEPS - SAVED_AFTER, first=SAVED_AFTER, part=part)
    return report(parameters(model), optimizer.scales(), alone(base, True), tuners_of(optimizer))


def load(model, optimizer, path, flatten=False):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    state = checkpoint_of(model, optimizer, flatten)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=flatten),
    )


def _path(folder, layout, base, flatten, ranks=None):
    return f"{folder}/{layout} {base} flat={flatten} on {ranks or dist.get_world_size()}"


CASES = {
    2: [
        *(ddp, fsdp2, fsdp2_offload, tensor_parallel, fsdp1_flat, fsdp1_orig, zero_redundancy, pipeline),
        *(
            sequence_parallel,
            no_gradient_on_some_ranks,
            tensor_parallel_without_a_gradient,
            pipeline_without_a_gradient,
            observing,
            own_iterates,
            mixed_precision,
            collectives,
            one_bad_rank,
            fsdp1_without_a_group,
        ),
    ],
    3: [ddp, fsdp2, tensor_parallel, fsdp1_flat, fsdp1_orig, zero_redundancy],
    4: [ddp, fsdp2, hsdp, tensor_parallel, tensor_parallel_fsdp2, two_meshes, fsdp1_orig, zero_redundancy],
}


SETUPS = [("AdamW", True), ("SGD momentum", False)]
"""A base, and whether groups have tuners of their own."""


COVERAGE = "COVERAGE_PROCESS_CONFIG"  # in the environment of processes that are measured
PRELOADED = [
    "tests.torch.muon_parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]


def on_ranks(target, ranks, timeout, *arguments):
    """Run ``target(rank, ...)`` on so many processes, every one of which is gone when this returns.

    They are forked from a server that has imported what they need: each would need 5 to 10 s for that. The server keeps
    the environment that it was started with, so they get ours.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours = dict(os.environ)
    processes = [context.Process(target=_start, args=(ours, target, rank, *arguments)) for rank in range(ranks)]
    os.environ.pop(COVERAGE, None)  # the server is not measured
    try:
        for process in processes:
            process.start()
    finally:
        os.environ.update(ours)
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        assert codes == [0] * ranks, f"exit codes {codes}; None is a rank that did not end in {timeout} s"
    finally:
        for process in processes:
            process.kill()
            process.join()


def _start(environment, target, *arguments):
    os.environ.clear()
    os.environ.update(environment)
    if COVERAGE in environment:
        import coverage

        coverage.process_startup()
    target(*arguments)


def main(rank, ranks, folder, jobs=None):
    """Run the cases of so many ranks, or the jobs given: (function, its arguments). Rank 0 writes what was found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    if jobs is None:
        jobs = [(case, setup) for case in CASES[ranks] for setup in SETUPS]
    results = {}
    for function, arguments in jobs:
        try:
            results[(function.__name__, *arguments)] = function(*arguments)
        except Exception:
            results[(function.__name__, *arguments)] = {"error": traceback.format_exc()}
        dist.barrier()
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    dist.barrier()
    # Past all that matters: threads of the many groups made here may abort an orderly exit.
    os._exit(0)
