"""What a step does, counted where noise does not reach: a slower step fails here. docs/speed.md has the times."""

import pytest
from torch.optim import SGD, AdamW

from mechanic.torch import Mechanic
from tests.torch.paths import on_copies
from tests.torch.traffic import traffic

CACHE = 2 << 20  # bytes that a core of a server's CPU has for itself


# Words that operators are given, per parameter: in cache or not. The sums are 7 of them, torch's fused steps 4 and 3.
# S is growing here; where it is not, nothing is forgotten, and with a CPU's tensors one word less is touched.
WORDS = {
    "AdamW, on Delta": (lambda p: Mechanic(AdamW(p, fused=True)), 7 + 5 + 4 + 2),
    "AdamW without decay, on Delta": (lambda p: Mechanic(AdamW(p, fused=True, weight_decay=0.0)), 7 + 3 + 4 + 2),
    "AdamW, on copies": (lambda p: on_copies(AdamW(p, fused=True)), 7 + 2 + 4 + 9),
    "SGD, on Delta": (lambda p: Mechanic(SGD(p, momentum=0.9, fused=True)), 7 + 3 + 3 + 2),
    "SGD, on copies": (lambda p: Mechanic(SGD(p, momentum=0.9, weight_decay=0.1, fused=True)), 7 + 2 + 3 + 9),
}


@pytest.mark.parametrize("name", WORDS)
def test_so_many_words_are_touched(name):
    build, expected = WORDS[name]
    seen = traffic(build, tensors=2, elements=1 << 20)
    assert seen.bytes / (4 * 2 * (1 << 20)) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("name", "words_of_base"), [("AdamW, on Delta", 4), ("AdamW, on copies", 4), ("SGD, on Delta", 3)]
)
def test_all_but_one_pass_beside_the_bases_own_goes_in_pieces_that_stay_in_cache(name, words_of_base):
    """That pass touches two words per parameter: it makes the copies, or adds S' Delta' to the parameters."""
    elements = 1 << 22
    seen = traffic(WORDS[name][0], tensors=1, elements=elements)
    beyond_cache = sum(size for _, size in seen.calls if size > CACHE)
    assert beyond_cache / (4 * elements) == pytest.approx(words_of_base + 2, abs=0.02)


def test_thousands_of_tensors_take_few_calls_each():
    build = WORDS["AdamW, on copies"][0]
    calls = [len(traffic(build, tensors, elements=100).calls) for tensors in (100, 1100)]
    assert (calls[1] - calls[0]) / 1000 <= 1.1  # the copy


def test_on_delta_the_calls_do_not_grow_with_the_tensors():
    build = WORDS["AdamW, on Delta"][0]
    calls = [len(traffic(build, tensors, elements=100).calls) for tensors in (100, 1100)]
    assert calls[1] - calls[0] <= 10
