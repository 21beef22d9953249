"""What a step does, counted where noise does not reach: a slower step fails here. docs/speed.md has the times."""

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mechanic.torch import Mechanic

FREE = {"alias", "detach", "permute", "reshape", "select", "slice", "split", "squeeze", "unbind", "unsqueeze", "view"}


class Traffic(TorchDispatchMode):
    """Counts operator calls, and the bytes of all tensors that they are given or make."""

    def __init__(self):
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in FREE:
            self.calls += 1
            tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)}
            self.bytes += sum(tensor.nbytes for tensor in tensors.values())
        return result


def traffic(build, tensors, elements):
    """Of one step in mid-training: words per parameter, and calls."""
    params = [torch.nn.Parameter(torch.ones(elements)) for _ in range(tensors)]
    optimizer = build(params)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    with Traffic() as seen:
        optimizer.step()
    return seen.bytes / (4 * tensors * elements), seen.calls


def watched(base):
    base.register_step_post_hook(lambda *_: None)  # so the base is lent copies
    return base


# Words that operators are given, per parameter: in cache or not. The sums are 7 of them, torch's fused steps 4 and 3.
# S is growing here; where it is not, nothing is forgotten, and with a CPU's tensors one word less is touched.
WORDS = {
    "AdamW, on Delta": (lambda p: Mechanic(AdamW(p, fused=True)), 7 + 5 + 4 + 2),
    "AdamW without decay, on Delta": (lambda p: Mechanic(AdamW(p, fused=True, weight_decay=0.0)), 7 + 3 + 4 + 2),
    "AdamW, on copies": (lambda p: Mechanic(watched(AdamW(p, fused=True))), 7 + 2 + 4 + 9),
    "SGD, on Delta": (lambda p: Mechanic(SGD(p, momentum=0.9, fused=True)), 7 + 3 + 3 + 2),
    "SGD, on copies": (lambda p: Mechanic(SGD(p, momentum=0.9, weight_decay=0.1, fused=True)), 7 + 2 + 3 + 9),
}


@pytest.mark.parametrize("name", WORDS)
def test_so_many_words_are_touched(name):
    build, expected = WORDS[name]
    words, _ = traffic(build, tensors=2, elements=1 << 20)
    assert words == pytest.approx(expected, abs=0.02)


def test_long_tensors_are_worked_on_in_pieces_that_stay_in_cache():
    _, short = traffic(WORDS["AdamW, on copies"][0], tensors=1, elements=1 << 18)
    _, long = traffic(WORDS["AdamW, on copies"][0], tensors=1, elements=1 << 22)
    assert long - short == 10 * (32 - 2)  # five dots and the five operators that combine, of each piece


def test_thousands_of_tensors_take_few_calls_each():
    build = WORDS["AdamW, on copies"][0]
    calls = [traffic(build, tensors, elements=100)[1] for tensors in (100, 1100)]
    assert (calls[1] - calls[0]) / 1000 <= 1.1  # the copy


def test_on_delta_the_calls_do_not_grow_with_the_tensors():
    build = WORDS["AdamW, on Delta"][0]
    calls = [traffic(build, tensors, elements=100)[1] for tensors in (100, 1100)]
    assert calls[1] - calls[0] <= 10
