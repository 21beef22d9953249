"""Delta in bfloat16 and int8: what comes back from it, and what its random numbers promise."""

import itertools
import math

import pytest
import torch

from mechanic.torch.delta import BLOCK, ROW, Noise, Stored, blocks_in, decode, encode
from mechanic.torch.lists import Factors, Start, move

CPU = torch.device("cpu")
SIZES = (0, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7, ROW, ROW + 1, 2 * ROW + BLOCK + 3)


def int8(shape, number=0):
    codes = torch.zeros(shape, dtype=torch.int8)
    return Stored(codes, torch.zeros(blocks_in(codes.numel())), number)


def bfloat16(shape, number=0):
    return Stored(torch.zeros(shape, dtype=torch.bfloat16), None, number)


both = pytest.mark.parametrize("make", [bfloat16, int8])


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def stored(make, values, step=None, number=0):
    """What comes back of values; without a step they are rounded to nearest."""
    kept = make(values.shape, number)
    encode(values, kept, None if step is None else Noise(step, CPU))
    return decode(kept)


def gap(make, values):
    """The distance between the two numbers that can be stored around each value."""
    if make is bfloat16:
        return torch.exp2(torch.floor(torch.log2(values.abs())) - 7)
    if not values.numel():
        return values
    largest = torch.cat([block.abs().max().expand(len(block)) for block in values.split(BLOCK)])
    code = torch.floor(127 * (values.abs() / largest).sqrt())
    return (2 * code + 1) / 127**2 * largest


@both
def test_values_come_back_within_a_gap_and_to_nearest_within_half(make):
    for size in SIZES:
        values = normal(size)
        error = [(stored(make, values, step) - values).abs() / gap(make, values) for step in (0, 1, None)]
        assert all((part <= 1.001).all() for part in error)
        assert (error[-1] <= 0.501).all()


def test_an_int8_block_keeps_its_largest_element_exactly():
    values = normal(5 * BLOCK + 7)
    for step in (None, 0, 1):
        found = stored(int8, values, step)
        for block, kept in zip(values.split(BLOCK), found.split(BLOCK), strict=True):
            largest = block.abs().argmax()
            assert kept[largest] == block[largest]


@pytest.mark.long
@both
def test_rounding_is_right_in_the_mean(make):
    """Of every element, over steps: the largest of 1,000 means lies within 4.5 standard deviations."""
    values, steps = normal(1000), 400
    mean = sum(stored(make, values, step).double() for step in range(steps)) / steps
    assert ((mean - values).abs() <= 4.5 * 0.5 / math.sqrt(steps) * gap(make, values)).all()


@both
def test_the_error_of_a_sum_is_that_of_independent_errors_or_less(make):
    """<Delta, g> adds up over all elements: errors that went together would not cancel."""
    values, gradient = normal(3 * ROW + 100), normal(3 * ROW + 100, seed=1) + 0.3
    errors = [torch.dot((stored(make, values, step) - values).double(), gradient.double()) for step in range(100)]
    errors = torch.stack(errors)
    independent = (0.5 * gap(make, values) * gradient).norm()
    assert errors.square().mean().sqrt() <= independent
    assert errors.mean().abs() <= 4 * independent / math.sqrt(100)


@pytest.mark.long
@both
def test_steps_below_the_last_bit_add_up(make):
    """To nearest they would all be lost."""
    start = normal(4 * BLOCK).abs() + 1
    kept = make(start.shape)
    encode(start, kept)
    first = decode(kept)
    small, steps = 8e-5, 500
    for step in range(steps):
        values = decode(kept) + small
        encode(values, kept, Noise(step, CPU))
    grown = decode(kept) - first
    # Each of 1,024 elements is a walk of variance small * gap per step.
    spread = math.sqrt(steps * small * gap(make, start).mean() / len(start))
    assert grown.mean() == pytest.approx(steps * small, abs=4 * spread)


@both
def test_what_was_stored_comes_back_bit_for_bit(make):
    """Rounded to nearest, as a checkpoint is, and stochastically as well."""
    values = normal(2 * ROW + 300) * torch.exp(4 * normal(2 * ROW + 300, seed=2))
    kept, again = make(values.shape), make(values.shape)
    encode(values, kept, Noise(0, CPU))
    for noise in (None, Noise(5, CPU)):
        encode(decode(kept), again, noise)
        assert kept.codes.equal(again.codes)
        assert make is bfloat16 or kept.scales.equal(again.scales)


@both
def test_zeros_stay_zeros(make):
    values = torch.cat([torch.zeros(BLOCK), normal(BLOCK), torch.zeros(9)])
    for step in (None, 0, 1):
        found = stored(make, values, step)
        assert not found[:BLOCK].any()
        assert not found[2 * BLOCK :].any()
        assert found[BLOCK : 2 * BLOCK].any()


@both
def test_tiny_and_huge_values(make):
    for size, step in itertools.product((1e-44, 1e-38, 1e-30, 1e-20, 1e20, 3e38), (None, 0)):
        values = torch.linspace(-1, 1, 500, dtype=torch.float64).mul(size).float()
        found = stored(make, values, step)
        assert found.isfinite().all()
        # bfloat16 has the range of float32; int8 ends at 6e-35, below which a value is rounded up to this or down to 0.
        least = 1e-40 if make is bfloat16 else 1e-30 / 127**2
        assert ((found - values).double().abs() <= values.double().abs().max() / 60 + least).all()
    assert stored(make, torch.full((3,), 3e38))[0] == pytest.approx(3e38, rel=0.01)


@both
def test_what_is_not_finite_is_not_hidden(make):
    for bad, step in itertools.product((float("inf"), -float("inf"), float("nan")), (None, 0)):
        values = normal(3 * BLOCK)
        values[BLOCK + 5] = bad
        found = stored(make, values, step)
        assert not found[BLOCK + 5].isfinite()
        assert found[:BLOCK].isfinite().all()
        assert found[2 * BLOCK :].isfinite().all()


@both
def test_shapes_and_memory_orders_come_back(make):
    for values in (
        normal(()),
        normal(0, 3),
        normal(7, 5).t(),
        normal(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ):
        codes = torch.zeros_like(values, dtype=make(()).codes.dtype)
        scales = torch.zeros(blocks_in(codes.numel())) if make is int8 else None
        for given in (values, values.contiguous()):
            encode(given, Stored(codes, scales), Noise(0, CPU))
            found = decode(Stored(codes, scales))
            assert found.stride() == codes.stride()
            torch.testing.assert_close(found, values, rtol=0.02, atol=0.05)


@both
def test_in_pieces_it_is_the_same(make):
    values = normal(3 * ROW + 300)
    whole, cut = make(values.shape, 3), make(values.shape, 3)
    noise = Noise(7, CPU)
    encode(values, whole, noise)
    for first in range(0, len(values), ROW):
        piece = cut.part(cut.codes[first : first + ROW], first)
        encode(values[first : first + ROW], piece, noise)
        assert decode(piece).equal(decode(whole)[first : first + ROW])
    assert whole.codes.equal(cut.codes)


def test_random_numbers_differ_by_step_tensor_and_row_and_are_spread_evenly():
    rows = [
        Noise(step, CPU).fractions(Stored(torch.zeros(ROW), None, number, first))
        for step, number, first in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, ROW), (100_000, 0, 0), (0, 500, ROW)]
    ]
    for row in rows:
        assert row.mean() == pytest.approx(0.5, abs=1e-6)
        assert row.min() > 1e-5
        assert row.max() < 1 - 1e-5
    several = torch.stack([*rows, rows[0].roll(1), rows[0].roll(2), rows[0].roll(BLOCK)])
    correlations = torch.corrcoef(several) - torch.eye(len(several))
    assert correlations.abs().max() < 5 / math.sqrt(ROW)


def test_a_step_counted_on_the_device_gives_the_same_numbers():
    place = Stored(torch.zeros(100), None, 4)
    for step in (0, 1, 12345, 2_000_000_000):
        on_host, on_device = Noise(step, CPU), Noise(torch.tensor(step), CPU)
        assert on_host.fractions(place).equal(on_device.fractions(place))
        assert on_host.low_bits(place).equal(on_device.low_bits(place))


@both
def test_torchs_generator_is_left_alone(make):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    stored(make, normal(100), 5)
    assert torch.get_rng_state().equal(before)


def test_int8_takes_at_most_1_02_bytes_per_element():
    kept = int8((1000, 1000))
    assert kept.codes.nbytes + kept.scales.nbytes <= 1.02e6


@both
def test_a_move_without_the_base_keeps_the_same_share_of_every_element(make):
    """As at the end of a step inside the backward pass: Delta' = k Delta, in int8 without rounding."""
    values, kept = normal(5, 300), make((5, 300))
    encode(values, kept)
    before, param = decode(kept), torch.zeros(5, 300)
    none, k, change = torch.zeros(()), torch.tensor(0.9), torch.tensor(0.5)
    move([param], [], [kept], [], Start("x", torch.float32), Factors(None, Noise(3, CPU), none, none, change, k))
    tolerance = 1e-6 if make is int8 else 2**-7
    torch.testing.assert_close(decode(kept), 0.9 * before, rtol=tolerance, atol=1e-30)
    torch.testing.assert_close(param, 0.5 * 0.9 * before)
