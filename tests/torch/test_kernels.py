"""The sums are exact to the last digits of float32, however long and however many the tensors."""

import pytest
import torch

from mechanic.torch.kernels import eager

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
    assert eager.dot(a, b, CPU).dtype == torch.float64
    assert eager.dot(a, b, CPU).item() == pytest.approx(expected, rel=1e-6)


def test_one_long_dot_would_not_do():
    (a,), (b,) = lists([(1 << 24,)])
    exact = (a.double() * b.double()).sum().item()
    whole, ours = (abs(value.item() - exact) / exact for value in (torch.dot(a, b), eager.dot([a], [b], CPU)))
    assert ours < whole / 2


def test_lists_of_different_dtypes_and_layouts_meet():
    torch.manual_seed(0)
    a, b = torch.randn(2, 300, 400)
    expected = (a.double() * b.bfloat16().double()).sum().item()
    assert eager.dot([a.T], [b.T.contiguous().bfloat16()], CPU).item() == pytest.approx(expected, rel=1e-5)


HUNDRED_MILLION = 10**8


def in_float64(params, grads, deltas):
    """The five sums, for reference."""
    pairs = [(deltas, grads), (deltas, params), (grads, grads), (params, params), (deltas, deltas)]
    return [
        sum(torch.dot(x.double(), y.double()).item() for x, y in zip(a.split(1 << 22), b.split(1 << 22), strict=True))
        for a, b in pairs
    ]


@pytest.mark.parametrize("shape", ["one tensor", "short ones"])
def test_all_sums_hold_at_a_hundred_million_elements(shape, hundred_million):
    tensors, expected = hundred_million
    lists = [list(tensor.split(20_000 if shape == "short ones" else HUNDRED_MILLION)) for tensor in tensors]
    sums = eager.measure(*lists, 1.0, CPU).tolist()
    assert sums == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def hundred_million():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(HUNDRED_MILLION + 2, generator=generator)
    tensors = numbers[:-2], numbers[1:-1], numbers[2:]  # three in the memory of one
    return tensors, in_float64(*tensors)


def test_layouts_that_do_not_match_are_summed_as_well():
    torch.manual_seed(0)
    a, b = torch.rand(2, 2000, 3000)
    expected = (a.double() * b.double()).sum().item()
    assert eager.dot([a.T], [b.T.contiguous()], CPU).item() == pytest.approx(expected, rel=1e-6)


def test_flat_views_share_memory_with_tensors_that_are_laid_out_alike():
    for tensors in (torch.rand(2, 4, 6), torch.rand(2, 6, 4).mT, torch.rand(2, 3, 5, 7).permute(0, 2, 3, 1)):
        views = eager.flat_views(list(tensors))
        for view, tensor in zip(views, tensors, strict=True):
            assert view.shape == (tensor.numel(),)
            assert view.data_ptr() == tensor.data_ptr()
        assert torch.dot(*views).item() == pytest.approx((tensors[0] * tensors[1]).sum().item())


def test_tensors_that_are_laid_out_differently_have_no_flat_views():
    assert eager.flat_views([torch.rand(4, 6), torch.rand(6, 4).T]) is None
    assert eager.flat_views([torch.rand(4, 12)[:, ::2], torch.rand(4, 12)[:, ::2]]) is None


LENGTHS = (1, 3, 5_000, eager.PIECE["cpu"] + 7)  # joined, and cut into pieces


def lists_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(length, generator=generator, dtype=torch.float64) for length in LENGTHS] for _ in range(count)]


def scalar(value):
    return None if value is None else torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize(("decay", "retention"), [(0.0, None), (0.25, None), (0.0, 0.9), (0.25, 0.9)])
def test_restoring_undoes_preparing(decay, retention):
    (values, deltas), (x, d) = lists_of(2), lists_of(2)
    eager.prepare_delta(values, deltas, scalar(0.5), decay, scalar(retention))
    for prepared, delta, x_before, d_before in zip(values, deltas, x, d, strict=True):
        torch.testing.assert_close(prepared, x_before - 0.5 * d_before)
        torch.testing.assert_close(delta, (retention or 1.0) * d_before - decay * x_before)
    eager.restore_delta(values, deltas, scalar(0.5), decay, scalar(retention))
    torch.testing.assert_close([*values, *deltas], [*x, *d])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_clearing_zeroes_everything_or_nothing(dtype):
    values = torch.tensor([1.5, -2.0, float("inf"), float("nan"), 0.0]).to(dtype)
    kept, cleared = values.clone(), values.clone()
    eager.clear_unless(torch.tensor(True), [kept])
    eager.clear_unless(torch.tensor(False), [cleared])
    assert kept.view(torch.uint8).equal(values.view(torch.uint8))
    assert not cleared.view(torch.uint8).any()
