"""What ranks do: train in a layout and compare with one process, save and resume. Real processes, on gloo.

A job is a function, mostly a partial one, that all ranks call, and that raises where a promise does not hold.
"""

import functools
import multiprocessing
import os
import time
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mechanic.torch import Mechanic, mechanic_class
from mechanic.torch import backward as in_the_backward_pass
from mechanic.torch.buckets import decoded
from tests.torch.task import learned

STEPS = 30
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


class WideModel(Model):
    """With a weight of several blocks of codes, cut where no block ends."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(13, 45), nn.Linear(45, 3)

    def forward(self, inputs):
        return super().forward(inputs) + self.narrow(torch.tanh(self.wide(inputs)))


def batch(step):
    inputs = torch.randn(BATCH, 13, generator=torch.Generator().manual_seed(step))
    return inputs, torch.sin(inputs[:, :3])


def share(tensor):
    """This rank's part of a batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else tensor


def everything(tensor):
    """As every rank sees it where the batch is not divided."""
    return tensor


def loss_of(model, step, part=share):
    inputs, targets = (part(tensor) for tensor in batch(step))
    return (model(inputs.to(next(model.parameters()).dtype)).float() - targets).square().mean()


def param_groups(model, per_group):
    if not per_group:
        return list(model.parameters())
    first = [p for name, p in model.named_parameters() if "first" in name]
    rest = [p for name, p in model.named_parameters() if "first" not in name]
    return [{"params": first, "tuner": "first"}, {"params": rest, "tuner": "rest"}]


def wrap(model, base="AdamW", per_group=True, *, in_backward=False, **options):
    cls, arguments = BASES[base]
    optimizer = Mechanic(cls(param_groups(model, per_group), **arguments), **options)
    if in_backward:
        in_the_backward_pass.WAITING = 1 if per_group else 100  # these parameters are small
        optimizer.step_in_backward()
    return optimizer


def train(model, optimizer, steps=STEPS, first=0, part=share, after_backward=lambda step: None):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step, part).backward()
        after_backward(step)
        optimizer.step()


# Layouts.


def flat(model, **options):
    """Under FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def parallelize(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def placed(layout, model):
    """A model in a layout, and the part of a batch that this rank sees."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    part, ranks = share, dist.get_world_size()
    if layout == "alone":
        part = everything
    elif layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif layout in ("fsdp2", "fsdp2, offloaded"):
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if "offloaded" in layout else {}
        mesh = init_device_mesh("cpu", (ranks,))
        fully_shard(model.first, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    elif layout == "hsdp":  # on two ranks both hold everything, in DTensors
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        parallelize(model, init_device_mesh("cpu", (ranks,)))
        part = everything
    elif layout == "tp+fsdp2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        half = mesh["dp"].get_local_rank()

        def part(tensor):
            return tensor.chunk(2)[half]

    elif layout == "two meshes":  # as experts are laid out: some parameters over all ranks, some over half, and twice
        fully_shard(model.first, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")))
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    else:
        use_orig_params = {"fsdp1, flat": False, "fsdp1, original": True}[layout]
        model = flat(model, use_orig_params=use_orig_params, process_group=dist.group.WORLD)
    return model, part


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def parameters(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    is_flat = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model) if is_flat else nullcontext():
        return {
            name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): whole(p.detach()).clone()
            for name, p in model.named_parameters()
        }


# Comparing.


def difference(found, expected):
    """The distance of two models, relative to the norm of the second."""
    names = sorted(expected)
    a, b = (torch.cat([model[name].double().flatten() for name in names]) for model in (found, expected))
    return ((a - b).norm() / b.norm()).item()


def of_all_ranks(found):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return gathered


def same_on_all_ranks(tensor):
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return all(tensor.equal(other) for other in gathered)


def tuners_of(optimizer):
    return torch.cat([group["mechanic_tuner"].flatten() for group in optimizer.param_groups])


def assert_follows(found, optimizer, expected, within=1e-6):
    """``expected`` has the parameters and the scales of another run."""
    expected_parameters, expected_scales = expected
    assert same_on_all_ranks(tuners_of(optimizer))  # first: a rank that fails below must not leave others waiting
    of_parameters, scales = difference(found, expected_parameters), optimizer.scales()
    assert of_parameters <= within, of_parameters
    of_scales = max(abs(scales[name] - s) / s for name, s in expected_scales.items())
    assert of_scales <= within, of_scales


@functools.cache
def alone(base="AdamW", per_group=True, **options):
    """The same run in one process: the parameters, and S of every tuner."""
    if options.get("in_backward"):  # which several ranks of plain parameters have to be told apart for
        options["process_group"] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = Model()
    optimizer = wrap(model, base, per_group, **options)
    train(model, optimizer, part=everything)
    return parameters(model), optimizer.scales()


def follow(layout, base="AdamW", per_group=True, **options):
    model, part = placed(layout, Model())
    expected = alone(base, per_group, **options)
    if layout.startswith("fsdp1"):
        options["process_group"] = dist.group.WORLD
    optimizer = wrap(model, base, per_group, **options)
    left = []

    def after_backward(step):
        left.extend(p for p in model.parameters() if p.grad is not None)

    train(model, optimizer, part=part, after_backward=after_backward)
    assert_follows(parameters(model), optimizer, expected)
    if options.get("in_backward"):
        assert not left
        assert collectives_of_a_step(model, optimizer, part) == 1


def collectives_of_a_step(model, optimizer, part=share):
    from torch.distributed.tensor.debug import CommDebugMode

    loss_of(model, 0, part).backward()
    with CommDebugMode() as mode:
        optimizer.step()
    return mode.get_total_counts()


# Layouts with parts of their own.


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    cls, arguments = BASES["AdamW"]
    model = nn.parallel.DistributedDataParallel(Model())
    in_world = functools.partial(_in_world, mechanic_class(cls))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), in_world, **arguments)
    train(model, optimizer)
    assert_follows(parameters(model), optimizer.optim, alone(per_group=False))


def _in_world(cls, params, **arguments):
    return Mechanic(cls.base_class(params, **arguments), process_group=dist.group.WORLD)


class NormedModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = nn.LayerNorm(12), nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(self.norm(inputs))))


def sequence_parallel():
    """Autograd leaves the norm's gradients as partial sums, one per rank."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor import parallel as tp

    models = NormedModel(), NormedModel()
    layouts = {
        "norm": tp.SequenceParallel(),
        "first": tp.ColwiseParallel(input_layouts=Shard(1)),
        "second": tp.RowwiseParallel(),
    }
    tp.parallelize_module(models[1], init_device_mesh("cpu", (2,)), layouts)
    optimizers = [wrap(model) for model in models]
    for step in range(STEPS):
        inputs = torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(step))
        own = inputs.chunk(2, dim=1)[dist.get_rank()]
        for model, optimizer, part in zip(models, optimizers, (inputs, own), strict=True):
            optimizer.zero_grad()
            (model(part) - torch.sin(inputs[..., :3])).square().mean().backward()
            optimizer.step()
    assert_follows(parameters(models[1]), optimizers[1], (parameters(models[0]), optimizers[0].scales()))


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


def lose_gradient(p, step):
    """Now and then a parameter has none."""
    if step % 3 == 1:
        p.grad = None


def pipeline(base="AdamW", per_group=True, *, loses=False):
    """Other parameters on every rank: the user names the group to sum over. The second may lose a gradient."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = Model()
    together, weight = wrap(model, base, per_group), model.second.weight
    train(model, together, part=everything, after_backward=lambda step: loses and lose_gradient(weight, step))
    expected = parameters(model), together.scales()

    rank, model = dist.get_rank(), Model()
    stage_model = _FirstStage(model) if rank == 0 else _SecondStage(model)
    stage = PipelineStage(stage_model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    cls, arguments = BASES[base]
    own = list(stage_model.parameters())
    # Tuners are told apart by name, and every rank has to know all of them in the same order.
    groups = [{"params": own if rank == index else [], "tuner": name} for index, name in enumerate(("first", "rest"))]
    optimizer = Mechanic(cls(groups if per_group else own, **arguments), process_group=dist.group.WORLD)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        schedule.step(inputs) if rank == 0 else schedule.step(target=targets)
        if rank == 1 and loses:
            lose_gradient(stage_model.second.weight, step)
        optimizer.step()
    first, second = of_all_ranks(parameters(stage_model))
    assert_follows(first | second, optimizer, expected)


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


def tensor_parallel_without_a_gradient():
    """The second rank loses the gradient of its half of a weight: as if that were a parameter of its own."""
    halved = _HalvedModel()
    together, lower = wrap(halved), halved.first.halves[1]
    train(halved, together, part=everything, after_backward=lambda step: lose_gradient(lower, step))
    expected = parameters(halved)
    expected["first.weight"] = torch.cat([expected.pop(f"first.halves.{half}") for half in range(2)])

    model, part = placed("tp", Model())
    optimizer, weight = wrap(model), model.first.weight
    train(
        model,
        optimizer,
        part=part,
        after_backward=lambda step: dist.get_rank() == 1 and lose_gradient(weight, step),
    )
    assert_follows(parameters(model), optimizer, (expected, together.scales()))


def no_gradient_on_some_ranks():
    """Two plain models under a named group, of which the second rank's loses a gradient now and then."""
    rank, (cls, arguments) = dist.get_rank(), BASES["AdamW"]

    def run(chosen, **options):
        models = [Model(), Model()]
        for p in models[1].parameters():
            p.data.mul_(1.5)
        trained = [models[index] for index in chosen]
        optimizer = Mechanic(cls([p for model in trained for p in model.parameters()], **arguments), **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for index in chosen:
                loss_of(models[index], 2 * step + index, everything).backward()
            lose_gradient(models[1].second.weight, step)
            optimizer.step()
        return parameters(models[rank]), optimizer

    expected, together = run([0, 1])
    found, apart = run([rank], process_group=dist.group.WORLD)
    assert_follows(found, apart, (expected, together.scales()))


def fsdp1_without_a_group():
    model = flat(Model(), use_orig_params=True)
    assert "process_group=torch.distributed.group.WORLD" in message_of(lambda: train(model, wrap(model), 1))


def meshes_that_do_not_hold_all_ranks():
    """Two experts, each on a mesh of its own two ranks, beside layers on all four: no known group has all shards."""
    from torch.distributed.fsdp import fully_shard

    model, (two_ranks, _) = Model(), dist.new_subgroups(2)
    fully_shard(model.first, mesh=DeviceMesh.from_group(two_ranks, "cpu"))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    assert "on meshes of [2, 4] ranks of 4; tell Mechanic" in message_of(lambda: train(model, wrap(model), 1))


def message_of(function):
    """What a refusal says."""
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


# What else a step promises.


def observing():
    """Held-out feedback on every other step, under FSDP2: still one collective a step."""
    from torch.distributed.tensor.debug import CommDebugMode

    runs = []
    for layout in ("alone", "fsdp2"):
        model, part = placed(layout, Model())
        optimizer, collectives = wrap(model), []
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
        runs.append((parameters(model), optimizer.scales()))
    assert collectives[1:] == [1] * (STEPS - 1), collectives  # in the first ranks compare the names of their tuners
    assert_follows(runs[1][0], optimizer, runs[0])


def mixed_precision(base="AdamW", per_group=True):
    """Beside the bare base at the learned rate: how far a bfloat16 forward leads each from its float32 run."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected, scales = alone(base, per_group)
    cls, arguments = BASES[base]

    def bare(model):
        optimizer = cls(param_groups(model, per_group), **arguments)
        for group in optimizer.param_groups:
            group["lr"] = scales[group["tuner"]] if per_group else scales["default"]
        return optimizer

    def run(make, *, sharded):
        model = Model()
        if sharded:
            fully_shard(model, mp_policy=policy)
        train(model, make(model), part=share if sharded else everything)
        return parameters(model)

    of_ours = difference(run(lambda model: wrap(model, base, per_group), sharded=True), expected)
    of_bare = difference(run(bare, sharded=True), run(bare, sharded=False))
    assert of_ours <= 3 * of_bare  # a start that differs by 1e-7 moves it between 1.4 and 2.4 times the bare base's


def at_most_one_collective_more():
    for layout, more in (("fsdp2", 1), ("ddp", 0)):
        counts = []
        for finish in (lambda bare: bare, Mechanic):
            model, part = placed(layout, Model())
            cls, arguments = BASES["AdamW"]
            optimizer = finish(cls(param_groups(model, per_group=True), **arguments))
            train(model, optimizer, 2, part=part)
            counts.append(collectives_of_a_step(model, optimizer, part))
        assert counts == [0, more], (layout, counts)


def one_bad_rank(*, skip=False, in_backward=False):
    """A gradient that is not finite on one rank only: all take the same decision."""
    model, _ = placed("fsdp2", Model())
    is_bad = False

    def spoil(p):
        if is_bad and dist.get_rank() == 1:
            p.grad._local_tensor[0, 0] = float("nan")

    model.first.weight.register_post_accumulate_grad_hook(spoil)
    optimizer = wrap(model, per_group=False, in_backward=in_backward, skip_nonfinite=skip)
    train(model, optimizer, 5)
    before, tuner, is_bad = parameters(model), learned(optimizer), True
    train(model, optimizer, 1, first=5)
    is_bad = False
    assert learned(optimizer).equal(tuner)
    assert (optimizer.nonfinite_steps, optimizer.skipped_steps) == (1, int(skip))
    after = parameters(model)
    assert all(p.isfinite().all() for p in after.values())
    assert all(p.equal(before[name]) for name, p in after.items()) == skip
    train(model, optimizer, 5, first=6)
    assert same_on_all_ranks(tuners_of(optimizer))


# Checkpoints, saved on some ranks in some layout, and continued on others.

BFLOAT16 = torch.bfloat16
KINDS = {  # a dtype, whether every rank sees the whole batch, so that its gradient has the bits of one process; options
    "AdamW": (torch.float32, False, {}),
    "in backward": (torch.float32, False, {"in_backward": True}),
    "Delta in float32": (torch.float32, False, {"delta": torch.float32}),
    "Delta in bfloat16": (torch.float32, False, {"delta": BFLOAT16}),
    "Delta in int8": (torch.float32, False, {"delta": "int8"}),
    "bfloat16": (BFLOAT16, True, {"delta": torch.float32}),
    "bfloat16, Delta in bfloat16": (BFLOAT16, True, {}),
    "bfloat16, Delta in int8": (BFLOAT16, True, {"delta": "int8"}),
}
GAP = {torch.float32: 2e-6, BFLOAT16: 2**-7, torch.int8: 2 / 127}
"""Between two values of Delta, relative to its largest element: so far it may be moved by rounding at random."""

SAVED_AFTER, CONTINUED = 10, 10


def build(kind, layout):
    dtype, sees_all, options = KINDS[kind]
    model, part = placed(layout, (WideModel() if "Delta" in kind else Model()).to(dtype))
    return model, wrap(model, **options), everything if sees_all else part


def checkpoint_of(model, optimizer, flatten=False):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    parts = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    return dict(zip(("model", "optimizer"), parts, strict=True))


def load(model, optimizer, path, flatten=False):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    state = checkpoint_of(model, optimizer, flatten)
    dcp.load(state, checkpoint_id=path)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    set_state_dict(model, optimizer, **parts, options=options)


def deltas(model, optimizer):
    """Decoded and whole."""
    return {
        name.removeprefix("module."): whole(decoded(optimizer.state[p])["mechanic_delta"]).double()
        for name, p in model.named_parameters()
    }


def farthest(found, expected):
    """The largest distance of two Deltas, relative to the largest element of each tensor."""
    return max(((found[name] - delta).abs().max() / delta.abs().max()).item() for name, delta in expected.items())


def save(kind, layout, folder, *, flatten=False, build=build, steps=SAVED_AFTER):
    """Save, then go on; where that leads is written beside it, with Delta at the time of saving."""
    from torch.distributed import checkpoint as dcp

    model, optimizer, part = build(kind, layout)
    train(model, optimizer, steps, part=part)
    optimizer.zero_grad()
    state, path = checkpoint_of(model, optimizer, flatten), _path(folder, kind, layout, dist.get_world_size())
    if flatten:
        dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, checkpoint_id=path)
    then = deltas(model, optimizer)
    train(model, optimizer, CONTINUED, first=steps, part=part)
    end = {"then": then, "end": parameters(model), "scales": optimizer.scales()}
    if dist.get_rank() == 0:
        torch.save(end, f"{path}.pt")


def resume(saved, kind, layout, folder, *, within=1e-6, flatten=False, build=build, steps=SAVED_AFTER):
    """Go on from what was saved by a run of a kind, in a layout, on so many ranks.

    Where all of them are the same it ends with the same bits, and elsewhere near by, as rounding allows.
    """
    path = _path(folder, *saved)
    expected = torch.load(f"{path}.pt")
    model, optimizer, part = build(kind, layout)
    load(model, optimizer, path, flatten)
    of_delta = farthest(deltas(model, optimizer), expected["then"])
    assert of_delta <= 0.5 * max(GAP[state["mechanic_delta"].dtype] for state in optimizer.state.values()), of_delta
    train(model, optimizer, CONTINUED, first=steps, part=part)
    end, was = parameters(model), (expected["end"], expected["scales"])
    if saved == (kind, layout, dist.get_world_size()):
        assert all(end[name].equal(value) for name, value in expected["end"].items())
        assert optimizer.scales() == expected["scales"]
    elif "Delta" in kind:
        assert difference(end, expected["end"]) <= 0.05
    else:
        if kind == "bfloat16":
            assert ulps(end, expected["end"]) <= 1
            was = end, expected["scales"]
        assert_follows(end, optimizer, was, within)


def ulps(found, expected):
    """The largest distance in units of the last place, which for bfloat16 are steps of its bits."""
    return max((_ordered_bits(found[name]) - _ordered_bits(expected[name])).abs().max().item() for name in expected)


def _ordered_bits(tensor):
    bits = tensor.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def _path(folder, kind, layout, ranks):
    return f"{folder}/{kind} in {layout} on {ranks}"


# Processes.

COVERAGE = "COVERAGE_PROCESS_CONFIG"  # in the environment of processes that are measured
PRELOADED = [
    "tests.torch.muon_parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]
TIMEOUT = 600  # seconds, for all jobs of one start


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


def run(ranks, folder, jobs):
    """Call all jobs on so many ranks, in one start."""
    folder.mkdir()
    on_ranks(main, ranks, TIMEOUT, ranks, str(folder), jobs)
    errors = torch.load(folder / "errors.pt")
    assert not errors, "\n".join([f"{len(errors)} of {len(jobs)} jobs failed on {ranks} ranks:", *errors])


def main(rank, ranks, folder, jobs):
    """Rank 0 writes what went wrong on any rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    errors = []
    for job in jobs:
        error = ""
        try:
            job()
        except Exception:
            error = f"{job}, on rank {rank}\n{traceback.format_exc()}"
        errors += [text for text in of_all_ranks(error) if text]
    if rank == 0:
        torch.save(errors, Path(folder) / "errors.pt")
    dist.barrier()
    # Past all that matters: threads of the many groups made here may abort an orderly exit.
    os._exit(0)
