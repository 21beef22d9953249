"""The sums are exact to the last digits of float32, however long and however many the tensors."""

import pytest
import torch

from mechanic.torch import vectors

CPU = torch.device("cpu")


def lists(sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [[torch.rand(size, generator=generator).to(dtype) for size in sizes] for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [[(1 << 24,)], [(3000, 1000), (17,), (1 << 21,)], [(5,)] * 1000, [()], [(0,), (2, 0)], []],
    ids=["long", "mixed", "many", "scalar", "empty", "none"],
)
def test_dot_against_float64(sizes, dtype):
    a, b = lists(sizes, dtype)
    expected = sum((x.double() * y.double()).sum().item() for x, y in zip(a, b, strict=True))
    assert vectors.dot(a, b, CPU).dtype == torch.float64
    assert vectors.dot(a, b, CPU).item() == pytest.approx(expected, rel=1e-6)


def test_one_long_dot_would_not_do():
    (a,), (b,) = lists([(1 << 24,)])
    exact = (a.double() * b.double()).sum().item()
    whole, ours = (abs(value.item() - exact) / exact for value in (torch.dot(a, b), vectors.dot([a], [b], CPU)))
    assert ours < whole / 2


def test_lists_of_different_dtypes_and_layouts_meet():
    torch.manual_seed(0)
    a, b = torch.randn(2, 300, 400)
    expected = (a.double() * b.bfloat16().double()).sum().item()
    assert vectors.dot([a.T], [b.T.contiguous().bfloat16()], CPU).item() == pytest.approx(expected, rel=1e-5)
