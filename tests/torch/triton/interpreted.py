"""Courses of training on CPU tensors, with the eager kernels and with Triton's, interpreted in a process of its own."""

import contextlib
import copy
from collections import Counter
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytorch_optimizer
import torch
from torch import optim
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from mechanic.torch import Mechanic, MechanicMuon, Together
from mechanic.torch.gpu import choice, columns, launches, listing, rules
from mechanic.torch.gpu.table import Kind, Listed, Table
from mechanic.torch.step import step_eagerly
from mechanic.tuner import TunerState, delta_retention, update
from tests.torch.triton.forcing import counted, using

columns.CHUNK, columns.BLOCK, columns.SMALL = 512, 256, 256  # so that a small tensor has several chunks and a remainder

_call, _known = InterpretedFunction.__call__, set()


def _call_without_delay(self, *arguments, **options):
    """The interpreter prepares Triton's language for every kernel. It need not do so for all that the kernel calls."""
    if self.fn in _known:
        return self.rewrite()(*arguments, **options)
    _known.add(self.fn)
    return _call(self, *arguments, **options)


InterpretedFunction.__call__ = _call_without_delay

SHAPES = [(17, 40), (), (0,), (5, 7)]

BASES = {
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.7, weight_decay=0.1),
    "AdamW maximize": lambda groups: optim.AdamW(groups, lr=1.0, maximize=True),
    "AdamW lr tensor": lambda groups: optim.AdamW(groups, lr=torch.tensor(0.5), weight_decay=0.1, foreach=False),
    "Adam with L2": lambda groups: optim.Adam(groups, lr=0.5, weight_decay=0.01),
    "SGD": lambda groups: optim.SGD(groups, lr=0.1, weight_decay=0.01),
    "SGD momentum": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.3),
    "SGD nesterov": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Lion": lambda groups: pytorch_optimizer.Lion(groups, lr=1.0, weight_decay=0.1),
    "NAdam": lambda groups: optim.NAdam(groups, lr=1.0, weight_decay=0.01),
    "NAdamW": lambda groups: optim.NAdam(groups, lr=1.0, weight_decay=0.1, decoupled_weight_decay=True),
    "RMSprop": lambda groups: optim.RMSprop(groups, lr=1.0),
    "RMSprop momentum": lambda groups: optim.RMSprop(groups, lr=1.0, momentum=0.9, weight_decay=0.01),
    "Adagrad": lambda groups: optim.Adagrad(groups, lr=1.0, weight_decay=0.01),
    # These step by themselves: on Delta, or on copies.
    "RAdam": lambda groups: optim.RAdam(groups, lr=1.0, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW amsgrad": lambda groups: optim.AdamW(groups, lr=1.0, weight_decay=0.1, amsgrad=True),
    "Adam with L2, amsgrad": lambda groups: optim.Adam(groups, lr=1.0, weight_decay=0.01, amsgrad=True),
}
WHOLE = list(BASES)[:13]
AROUND = list(BASES)[13:]
BASES["AdamW fused"] = lambda groups: optim.AdamW(groups, lr=0.7, weight_decay=0.1, fused=True)


class Course:
    """Two models that get the same gradients, one stepped by the eager kernels and one by Triton's."""

    def __init__(self, base, shapes=SHAPES, dtype=torch.float32, groups=1, **options):
        torch.manual_seed(0)
        start = [torch.randn(shape).to(dtype) for shape in shapes]
        self.kernels = ("eager", "triton")
        self.params = [[torch.nn.Parameter(x.clone()) for x in start] for _ in self.kernels]
        self.optimizers = [
            Mechanic(BASES[base]([{"params": params[i::groups]} for i in range(groups)]), **options)
            for params in self.params
        ]
        self.generator = torch.Generator().manual_seed(1)
        self.launches = []  # of every step
        self.before_step = lambda index, params: None
        self.largest = {}  # number of every tensor of the first model so far

    def gradients(self):
        """New ones, of a quadratic: so that they depend on where the first model is."""
        for p in self.params[0]:
            noise = torch.randn(p.shape, generator=self.generator, dtype=torch.float32)
            yield (
                (p.detach().to(torch.float32).real.sub(0.3).add(noise).to(p.dtype))
                if p.is_floating_point()
                else (torch.complex(noise, noise.flip(0)))
            )

    def run(self, steps=5):
        for index in range(steps):
            self.step(index, "step")
        return self

    def step(self, index, method):
        gradients = list(self.gradients())
        for kernels, params, optimizer in zip(self.kernels, self.params, self.optimizers, strict=True):
            for p, g in zip(params, gradients, strict=True):
                p.grad = torch.empty_like(p).copy_(g)
            self.before_step(index, params)
            with using(kernels), counted() as started:
                getattr(optimizer, method)()
            if "triton" in self.kernels and kernels == self.kernels[1]:
                self.launches.append(list(started))
        for kept in [dict(enumerate(self.params[0])), *self.optimizers[0].state.values()]:
            for tensor in kept.values():
                if torch.is_tensor(tensor) and tensor.numel():
                    size = tensor.detach().abs().max().item()
                    self.largest[id(tensor)] = max(size, self.largest.get(id(tensor), 0.0))

    def errors(self):
        """The largest differences, relative to the largest number that was in a tensor."""
        (eager, triton), (before, after) = self.params, self.optimizers
        pairs = list(zip(eager, triton, strict=True))
        deltas = [
            (before.state[a]["mechanic_delta"], after.state[b]["mechanic_delta"]) for a, b in pairs if a in before.state
        ]
        scales = [(float(a), float(b)) for a, b in zip(before.scales().values(), after.scales().values(), strict=True)]
        differences = [self.differences(before.state[a], after.state[b]) for a, b in pairs if a in before.state]
        return {
            "differing codes": sum(each[1] for each in differences) / max(1, sum(each[0] for each in differences)),
            "beyond a millionth": sum(self.beyond(a, b) for a, b in pairs) / sum(a.numel() for a in eager),
            "further apart": sum(each[2] for each in differences),
            "delta scales": max((each[3] for each in differences), default=0.0),
            "params": max(self.distance(a, b) for a, b in pairs),
            "deltas": max(self.distance(a, b) for a, b in deltas),
            "scales": max(abs(a - b) / a if a else abs(b) for a, b in scales),
            "learned": min(a for a, _ in scales),
            "differing": sum((a != b).sum().item() for a, b in pairs),
            "launches": self.launches,
            "same state": same_state(before, after),
        }

    def beyond(self, a, b):
        """How many elements are further apart than 1e-6 of the largest."""
        return int(((a - b).detach().abs() > 1e-6 * self.largest.get(id(a), 1.0)).sum())

    def differences(self, before, after):
        """Of stored Deltas: all codes, how many differ, how many by more than one, and how far scales are apart."""
        a, b = before["mechanic_delta"], after["mechanic_delta"]
        if a.dtype == torch.float32:
            return 0, 0, 0, 0.0
        codes = [code.view(torch.int16) if code.dtype == torch.bfloat16 else code for code in (a, b)]
        apart = (codes[0].int() - codes[1].int()).abs()
        scales = [state.get("mechanic_delta_scales", torch.zeros(1)) for state in (before, after)]
        largest = scales[0].abs().max().item() if a.numel() else 0.0
        of_scales = (scales[0] - scales[1]).abs().max().item() / largest if largest else 0.0
        return a.numel(), int((apart > 0).sum()), int((apart > 1).sum()), of_scales

    def distance(self, a, b):
        a, b = (tensor.detach().float() if tensor.dtype == torch.int8 else tensor for tensor in (a, b))
        return (a - b).detach().abs().max().item() / self.largest.get(id(a), 1.0) if a.numel() else 0.0


def same_state(before, after):
    """Whether both have the same state, entry by entry, and counted the same steps."""
    states = [optimizer.state_dict() for optimizer in (before, after)]
    kinds = [{i: sorted(kept) for i, kept in state["state"].items()} for state in states]
    steps = [[float(kept["step"]) for kept in state["state"].values() if "step" in kept] for state in states]
    return kinds[0] == kinds[1] and steps[0] == steps[1]


# What the tests call.


def plain(base, **options):
    return Course(base, **options).run().errors()


def failing(base):
    """After a base that fails, with either kernels: how far tuners, ``d`` and parameters are from what they were."""
    course = Course(base, groups=2).run()
    changed = []
    for kernels, params, optimizer in zip(course.kernels, course.params, course.optimizers, strict=True):
        before = [group[key].clone() for group in optimizer.param_groups for key in ("mechanic_tuner", "d")]
        values = [p.detach().clone() for p in params]
        optimizer.base.step, step = mock.Mock(side_effect=MemoryError), optimizer.base.step
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            with using(kernels), contextlib.suppress(MemoryError):
                optimizer.step()
        optimizer.base.step = step
        after = [group[key] for group in optimizer.param_groups for key in ("mechanic_tuner", "d")]
        moved = max((p - value).abs().max().item() for p, value in zip(params, values, strict=True) if p.numel())
        changed.append((max((a - b).abs().max().item() for a, b in zip(before, after, strict=True)), moved))
    return changed


def with_counters_on_the_device():
    was = listing.is_on_device
    rules.is_on_device = listing.is_on_device = lambda counter: True
    try:
        return Course("AdamW").run().errors()
    finally:
        rules.is_on_device = listing.is_on_device = was


def calls_of_torch_besides():
    """The operators that a step in three launches calls besides them."""
    course = Course("AdamW")
    course.run(2)
    called, launch, is_inside = [], launches.launch, []

    def log(name, *arguments, **constants):
        called.append("launch")
        is_inside.append(name)
        launch(name, *arguments, **constants)
        is_inside.clear()

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if not is_inside:  # the interpreter calls some as well
                called.append(str(function.overloadpacket))
            return function(*args, **(kwargs or {}))

    launches.launch = log
    try:
        with using("triton"), Log():
            course.optimizers[1].step()
    finally:
        launches.launch = launch
    return called


def calls_around_muon(tuners):
    """The kernels that a step of MechanicMuon starts, and the operators it calls beyond those of its optimizers."""
    launch, is_inside, started = launches.launch, [], []

    def log(name, *arguments, **constants):
        started.append(name)
        is_inside.append(name)
        launch(name, *arguments, **constants)
        is_inside.clear()

    class Log(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.called = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if not is_inside:
                self.called.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    def pair(model):
        weights, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
        return Together(optim.Muon(weights[:-1], lr=0.01), optim.AdamW([*biases, weights[-1]], lr=0.01))

    called = []
    launches.launch = log
    try:
        for build in (pair, partial(MechanicMuon, tuners=tuners)):
            model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
            optimizer = build(model)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            with using("triton"):
                for _ in range(3):
                    started.clear()
                    with Log() as seen:
                        optimizer.step()
            called.append(Counter(seen.called))
    finally:
        launches.launch = launch
    return started, dict(called[1] - called[0])


def launches_at(tensors, tuners):
    """How many kernels a step starts, and how often the table was uploaded when nothing moved."""
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.ones(5)
    groups = [{"params": params[i::tuners]} for i in range(tuners)]
    optimizer = Mechanic(optim.SGD(groups, lr=1.0), per_group=True)
    launch, launches.launch = launches.launch, lambda name, *_, **__: started.append(name)
    started = []
    try:
        with using("triton"):
            for _ in range(3):
                started.clear()
                optimizer.step()
    finally:
        launches.launch = launch
    return started, optimizer._wrapped.table.uploads


def five_sums_error(size):
    """Of the five sums, relative to the norms, in chunks as long as on a GPU."""
    torch.manual_seed(0)
    x, g, d = torch.randn(size), torch.randn(size) * 1e-3, torch.randn(size) * 1e-2
    sizes = columns.CHUNK, columns.BLOCK
    columns.CHUNK, columns.BLOCK = 1 << 16, 1 << 14
    try:
        table = Table(torch.device("cpu"))
        lists = {columns.X: [x], columns.G: [g], columns.D: [d]}
        numbers = [rules.numbers_around(1.0, 1.0, 0.0)]
        table.fill([Listed(Kind(x.dtype, g.dtype), 0, lists, numbers, [None], [0])], 1, lambda spans: ())
        found = launches.five_sums(table).sum(0)
    finally:
        columns.CHUNK, columns.BLOCK = sizes
    x, g, d = x.double(), g.double(), d.double()
    sizes = [(tensor @ tensor).item() for tensor in (g, x, d)]
    norms = [(sizes[2] * sizes[0]) ** 0.5, (sizes[2] * sizes[1]) ** 0.5, *sizes]
    exact = [(d @ g).item(), (d @ x).item(), *sizes]
    return max(abs(a - b) / norm for a, b, norm in zip(found.tolist(), exact, norms, strict=True))


def tune_error(config):
    """Of the kernel against mechanic.tuner, over tuners with random states; the second has two groups."""
    generator = torch.Generator().manual_seed(0)
    fields, n = len(TunerState._fields), len(config.betas)
    worst = 0.0
    for share in (1.0, 0.3, 0.0, -0.1):  # of the learning rate in its peak
        states = torch.rand(3, fields, n, generator=generator, dtype=torch.float64)
        by_scale = ("largest_feedback", "root_variance", "reward", "scales")
        alike = [row for row, name in enumerate(TunerState._fields) if name not in by_scale]
        states[:, alike] = states[:, alike, :1]  # one number per tuner
        states[:2, TunerState._fields.index("steps")] = torch.tensor([[4000.0], [100_000.0]])
        states[2] = 0.0  # the first step
        sums = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        sums[:, 2:].abs_()
        rates = share * states[:, TunerState._fields.index("largest_rate"), 0]
        rates[2] = 1.0
        if share == 1.0:
            sums[0, 2] = 1e-6  # |g| is tiny beside the largest
        if share == 0.3:
            sums[1, 0] = torch.nan
        if share == 0.0:
            sums[1, 2] = 0.0  # no gradient
        betas = torch.tensor(config.betas, dtype=torch.float64)
        before = TunerState(*states.unbind(1))
        after = update(before, sums, betas, config, torch, rates)
        kept = delta_retention(before, after, config, torch, rates)

        groups = [
            {"mechanic_row": row, "mechanic_unit": 2.0, "d": betas.new_zeros(()), "lr": rates[row].item()}
            | {"mechanic_tuner": torch.cat([betas[None], states[row]])}
            for row in (1, 0, 2, 1)
        ]
        table = Table(torch.device("cpu"))
        numbers = [group["lr"] for group in groups]
        table.fill([], 3, partial(listing.words_of_tuners, config, groups, numbers, show=True))
        tuned, unchanged = launches.tune(table, None, (sums, sums[:, 2].contiguous()), 3, config)
        assert unchanged.equal(torch.cat([betas.expand(3, 1, -1), torch.stack(before, 1)], 1))

        for group in groups:
            row = group["mechanic_row"]
            expected = torch.stack([field[row] for field in after])
            found = group["mechanic_tuner"][1:]
            worst = max(worst, ((found - expected).abs() / expected.abs().clamp_min(1e-30)).max().item())
            worst = max(worst, abs(group["d"].item() - expected[3].sum().item() / 2.0))
        expected = torch.ones(3, dtype=torch.float64) if kept is None else kept
        worst = max(worst, (tuned[:, columns.RETENTION] - expected).abs().max().item())
        for column, state in ((columns.BEFORE, before), (columns.AFTER, after)):
            worst = max(worst, (tuned[:, column] - state.scales.sum(-1)).abs().max().item())
        of_former = before.scales.sum(-1) / expected
        worst = max(worst, (tuned[:, columns.CHANGE] - (after.scales.sum(-1) - of_former)).abs().max().item())
        assert tuned[:, columns.FINITE].tolist() == [1.0, 1.0, 1.0]
    return worst


def reason_not_to_use(*, half, stored_in=None, broken=False, default_device="cpu"):
    """What the self-test says; with a broken kernel as well."""
    if broken:
        step, launches.step = launches.step, lambda table, tuned: step(table, tuned * 1.001)
    try:
        with torch.device(default_device):
            return choice.reason_not_to_use(torch.device("cpu"), step_eagerly, half=half, stored_in=stored_in)
    finally:
        if broken:
            launches.step = step


@contextmanager
def sizes_of_a_gpu():
    sizes = columns.CHUNK, columns.BLOCK
    columns.CHUNK, columns.BLOCK = 1 << 16, 1 << 10
    try:
        yield
    finally:
        columns.CHUNK, columns.BLOCK = sizes


def long_and_stored(base, **options):
    """A tensor of several chunks, rows and blocks, with a remainder of each; and short ones."""
    with sizes_of_a_gpu():
        return Course(base, shapes=[((1 << 16) + 1024 + 7,), (3,), (), (300, 3)], **options).run(4).errors()


def with_bad_gradients(base, value, **options):
    course = Course(base, **options)

    def spoil(index, params):
        if index == 2:
            params[0].grad[3, 4] = value

    course.before_step = spoil
    return course.run().errors()


def with_missing_gradients(base, **options):
    """One parameter never has a gradient, one begins late, and one has a gradient in every second step."""
    course = Course(base, **options)

    def remove(index, params):
        params[1].grad = None
        if index < 2:
            params[3].grad = None
        if index % 2:
            params[0].grad = None

    course.before_step = remove
    return course.run().errors()


def with_observations(base, **options):
    course = Course(base, shapes=[*SHAPES, (60, 70)], **options)
    for index in range(5):
        if index != 2:
            course.step(index, "observe")
        course.step(index, "step")
    return course.errors()


def in_other_layouts(base, **options):
    """Parameters in channels_last, with gaps, complex, in float64 and unaligned, and a gradient with other strides."""
    course = Course(base, shapes=[(2, 3, 4, 5), (6, 7), (5,), (6,), (301,), (8, 9)])
    for params in course.params:
        params[0].data = params[0].data.to(memory_format=torch.channels_last)
        params[1].data = torch.zeros(6, 14)[:, ::2].copy_(params[1].data)
        params[2].data = torch.complex(params[2].data, params[2].data)
        params[3].data = params[3].data.double()
        params[4].data = torch.zeros(302)[1:].copy_(params[4].data)

    def turn(index, params):
        params[5].grad = params[5].grad.T.contiguous().T

    course.before_step = turn
    course.optimizers = [Mechanic(BASES[base](params), **options) for params in course.params]
    return course.run().errors()


def in_half_precision(base, dtype, **options):
    """Somebody writes to the parameters in mid-course."""
    course = Course(base, dtype=dtype, **options)

    def write(index, params):
        if index == 2:
            params[0].data[:5] += 0.5

    course.before_step = write
    return course.run().errors()


def with_several_tuners(base, **options):
    course = Course(base, groups=2, per_group=True, **options)
    for optimizer in course.optimizers:
        optimizer.param_groups[1]["lr"] *= 0.25
    return course.run().errors()


def changing_kernels(first, base, **options):
    """Train with one, go on from its checkpoint with the other; against one that is eager all the time."""
    course = Course(base, **options)
    course.kernels = ("eager", first)
    course.run(3)
    state = copy.deepcopy(course.optimizers[1].state_dict())
    course.optimizers[1] = Mechanic(BASES[base](course.params[1]), **options)
    course.optimizers[1].load_state_dict(state)
    course.kernels = ("eager", "triton" if first == "eager" else "eager")
    return course.run(2).errors()
