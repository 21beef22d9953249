"""What a step does, counted where noise does not reach: a slower step fails here. docs/speed.md has the times."""

import pytest
from torch.optim import SGD, AdamW

from mechanic.torch import Mechanic
from tests.torch.traffic import traffic

CACHE = 2 << 20  # bytes that a core of a server's CPU has for itself


# Words that operators are given per parameter, in all and beyond the cache. The sums are 7 of them,
# torch's fused steps 4 and 3. S is growing here; where it is not, nothing is forgotten, and two words less are touched.
WORDS = {
    "AdamW": (lambda p: Mechanic(AdamW(p, fused=True)), 22, 7),
    "AdamW without decay": (lambda p: Mechanic(AdamW(p, fused=True, weight_decay=0.0)), 20, 7),
    "SGD": (lambda p: Mechanic(SGD(p, momentum=0.9, fused=True)), 19, 6),
    "SGD with decay": (lambda p: Mechanic(SGD(p, momentum=0.9, weight_decay=0.1, fused=True)), 22, 7),
}


@pytest.mark.parametrize("name", WORDS)
def test_so_many_words_are_touched(name):
    build, expected, expected_beyond_cache = WORDS[name]
    seen = traffic(build, tensors=2, elements=1 << 20)
    assert seen.bytes / (4 * 2 * (1 << 20)) == pytest.approx(expected, abs=0.02)
    long = traffic(build, tensors=1, elements=1 << 22)
    beyond_cache = sum(size for _, size in long.calls if size > CACHE)
    assert beyond_cache / (4 * (1 << 22)) == pytest.approx(expected_beyond_cache, abs=0.02)


@pytest.mark.long
@pytest.mark.parametrize("name", WORDS)
def test_a_tensor_more_takes_one_call_more(name):
    build = WORDS[name][0]
    calls = [len(traffic(build, tensors, elements=100).calls) for tensors in (100, 600)]
    assert (calls[1] - calls[0]) / 500 <= 1.1
