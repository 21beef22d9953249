"""Steps on CPU tensors that are told to be captured in a CUDA graph, with Triton's kernels in its interpreter."""

import torch
from torch import optim

from mechanic.torch import Mechanic, capture
from mechanic.torch.gpu import listing, rules
from mechanic.torch.gpu.table import Table
from tests.torch.triton import interpreted  # noqa: F401 makes the interpreter faster
from tests.torch.triton.forcing import counted, using


class Graph:
    """Two models that are stepped alike; in between, the second one's steps are told to be captured."""

    def __init__(self, make=optim.AdamW, delta=None, **options):
        torch.manual_seed(0)
        start = [torch.randn(33), torch.randn(4, 5)]
        self.params = [[torch.nn.Parameter(x.clone()) for x in start] for _ in range(2)]
        self.optimizers = [
            Mechanic(make(params, lr=torch.tensor(0.5), foreach=False, **options), delta=delta)
            for params in self.params
        ]
        for p in (*self.params[0], *self.params[1]):
            p.grad = torch.zeros_like(p)
        was = rules.is_on_device, capture.is_capturing
        self.undo = lambda: (
            setattr(rules, "is_on_device", was[0]),
            setattr(listing, "is_on_device", was[0]),
            setattr(capture, "is_capturing", was[1]),
        )
        rules.is_on_device = listing.is_on_device = lambda counter: True

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.undo()

    def step(self, number, only=(0, 1), captured=False):
        """Returns the kernels that were started, or why the step was refused."""
        for index in only:
            for p in self.params[index]:
                p.grad.copy_(torch.cos(number + p.detach()))
            optimizer, is_captured = self.optimizers[index], captured and index == 1
            for group in optimizer.param_groups:
                group["capturable"] = is_captured  # on CPUs torch has no steps that are
            capture.is_capturing = lambda groups, answer=is_captured: answer
            with using("triton"), counted() as started:
                try:
                    optimizer.step()
                except RuntimeError as error:
                    started = [str(error)]
        return started

    @property
    def table(self):
        return self.optimizers[1]._wrapped.table

    def are_equal(self):
        pairs = zip(*self.params, strict=True)
        scales = [optimizer.scales() for optimizer in self.optimizers]
        return scales[0] == scales[1] and all(torch.equal(a, b) for a, b in pairs)


def allowed(delta=None):
    """What a captured step starts, whether the table stayed, and whether the steps were the same."""
    with Graph(delta=delta) as graph:
        for number in range(3):
            graph.step(number)
        uploads, words, content = graph.table.uploads, graph.table.words, graph.table.words.clone()
        graph.optimizers[1].param_groups[0]["lr"].fill_(0.25)
        graph.optimizers[0].param_groups[0]["lr"].fill_(0.25)
        started = graph.step(3, captured=True)
        stays = graph.table.words is words and graph.table.uploads == uploads
        graph.params[1][0].grad = graph.params[1][0].grad.clone()  # a step outside of the graph has another table
        graph.step(4)
        return started, stays, torch.equal(words, content) and graph.table.words is not words, graph.are_equal()


def moved():
    """What is said where a gradient is elsewhere, and whether the steps after that are right."""
    with Graph() as graph:
        for number in range(3):
            graph.step(number)
        graph.params[1][0].grad = graph.params[1][0].grad.clone()
        refused = graph.step(3, captured=True, only=[1])
        graph.step(4)
        return refused, graph.are_equal()


def early():
    """After one step, which the base made by itself."""
    with Graph() as graph:
        graph.step(0)
        return graph.step(1, captured=True, only=[1])


def around():
    with Graph(amsgrad=True) as graph:
        for number in range(3):
            graph.step(number)
        refused = graph.step(3, captured=True, only=[1])
        graph.step(4)
        return refused, graph.are_equal()


def memory_that_is_reused():
    """Before and after a graph holds the table, and for another size."""
    table = Table(torch.device("cpu"))
    table.fill([], 0, lambda spans: (1, 2))
    same_size, former = torch.zeros(2, dtype=torch.int64), table.words
    before = table.room(same_size, former) is former
    held = table.fill_and_hold([], 0, lambda spans: (1, 2))
    after = table.room(same_size, former) is former
    return before, held, after, table.room(torch.ones(3), former).shape == (3,)
