"""What a step asks of a GPU, counted without one; docs/gpu.md has the figures and what they assume."""

import pytest
import torch
from torch.optim import SGD, AdamW

from benchmarks.speed.counter import CUDA_12, CUDA_13, OLD_TORCH, Counter, count_step
from benchmarks.speed.launches import MODELS, count
from mechanic.torch import Mechanic
from mechanic.torch.kernels import whole
from tests.torch.paths import on_copies

SMALL = [(64, 32), (64,), (), (0,), (32, 64)]
BUILDS = {
    "AdamW": lambda p: Mechanic(AdamW(p, lr=1.0, fused=True)),
    "AdamW on copies": lambda p: on_copies(AdamW(p, lr=1.0, fused=True)),
    "SGD": lambda p: Mechanic(SGD(p, lr=1.0, momentum=0.9, fused=True)),
}
HALF = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


# Calls, and launches with the limits of CUDA 13. It was 1,592 and 2,297 for GPT-2, with one launch or more per tensor.
@pytest.mark.parametrize(
    ("row", "model", "calls", "launches"),
    [
        ("`Mechanic(AdamW fused)`", "GPT-2 124M", 250, 320),
        ("`Mechanic(AdamW fused)`", "LoRA of 448", 165, 170),
        ("`Mechanic(AdamW fused)`, bfloat16", "GPT-2 124M", 400, 440),
    ],
)
def test_a_step_takes_so_many_calls_and_launches_and_waits_for_nothing(row, model, calls, launches):
    counted = count(row, model)
    assert counted.calls.total() <= calls
    assert counted.launches_with(CUDA_13) <= launches
    assert counted.host_reads == 0
    assert counted.copies_to_device == 0


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_around_muon_a_step_takes_few_launches_more_and_waits_for_nothing():
    bare, ours = (count(row, "GPT-2 124M") for row in ("Muon and AdamW fused", "`Mechanic(Muon and AdamW fused)`"))
    assert ours.launches_with(CUDA_13) - bare.launches_with(CUDA_13) <= 320  # without Triton, which takes 4
    assert ours.host_reads == ours.copies_to_device == 0


@HALF
@pytest.mark.parametrize("name", BUILDS)
def test_calls_do_not_grow_with_the_number_of_tensors(name, dtype):
    few, many = (count_step(BUILDS[name], [(100,)] * number, dtype) for number in (5, 45))
    assert many.calls == few.calls


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_only_inner_products_go_in_pieces(name):
    one_piece, two_pieces = (count_step(BUILDS[name], [(elements,)] * 4) for elements in (1 << 24, 1 << 25))
    assert two_pieces.calls - one_piece.calls == {"dot": 2 * 4}


@HALF
def test_nothing_is_read_or_copied_with_any_number_of_tuners(dtype):
    def build(params):
        return Mechanic(AdamW([{"params": [p]} for p in params], lr=1.0, fused=True), per_group=True)

    counted = count_step(build, SMALL, dtype)
    assert counted.host_reads == counted.copies_to_device == 0


def test_skipping_reads_one_value():
    counted = count_step(lambda p: Mechanic(AdamW(p, lr=1.0, fused=True), skip_nonfinite=True), SMALL)
    assert counted.host_reads == 1


def test_once_frozen_a_step_is_the_bases_own():
    bare = count_step(lambda p: AdamW(p, lr=1.0, fused=True), SMALL)
    frozen = count_step(BUILDS["AdamW"], SMALL, prepare=Mechanic.freeze)
    assert frozen.calls == bare.calls
    assert frozen.bytes == bare.bytes


def test_an_older_torch_takes_no_launch_per_short_tensor(monkeypatch):
    monkeypatch.setattr(whole, "TAKES_ZERO_DIM_FACTORS", False)
    few, many = (count_step(BUILDS["AdamW"], [(100,)] * number).launches_with(OLD_TORCH) for number in (10, 30))
    assert many == few


# The counter itself.


def counted(function):
    with Counter() as counter:
        function()
    return counter


def meta(*shapes, dtype=torch.float32):
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def test_views_and_empty_tensors_are_free():
    (x,) = meta((4, 6))
    seen = counted(
        lambda: (x.T, x.view(-1).split(5), x[1], x.detach(), torch.empty_like(x), x.unbind(), x.expand(2, 4, 6))
    )
    assert seen.calls.total() == seen.launches_with(CUDA_13) == seen.bytes == 0


def test_calls_are_counted_with_the_bytes_they_read_and_write():
    x, y, z = meta((100,), (100,), (100,))
    assert counted(lambda: x + y).bytes == 3 * 400
    assert counted(lambda: x.add_(y)).bytes == 3 * 400
    assert counted(lambda: x.copy_(y)).bytes == 2 * 400
    assert counted(lambda: torch._foreach_add_([x, y], [z, z])).bytes == 5 * 400
    assert counted(lambda: x + y).calls == {"add": 1}


def test_reads_on_the_host_are_counted_and_answered():
    (x,) = meta(())
    for read in (x.item, lambda: bool(x > 0), lambda: x.cpu(), lambda: torch.empty(()).copy_(x)):
        assert counted(read).host_reads == 1
    with Counter():
        assert x.item() == 1.0
        assert x.cpu() == 1.0
    assert counted(lambda: torch.ones(()).item()).host_reads == 0


def test_copies_to_the_device_are_counted():
    (x,) = meta((3,))
    host = torch.ones(3)
    for copy in (lambda: host.to("meta"), lambda: x.copy_(host), lambda: torch.tensor([1.0, 2.0], device="meta")):
        assert counted(copy).copies_to_device == 1
    assert counted(lambda: host.to(torch.float64)).calls.total() == 0


def test_launches_of_a_list_are_those_of_its_limits():
    def launches(shapes, limits):
        x, y = meta(*shapes), meta(*shapes)
        return counted(lambda: torch._foreach_add_(x, y)).launches_with(limits)

    assert [launches([(5,)] * number, CUDA_12) for number in (1, 64, 65, 128, 129)] == [1, 1, 2, 2, 3]
    assert [launches([(5,)] * number, CUDA_13) for number in (1, 448, 449)] == [1, 1, 2]
    assert launches([(0,), (5,), (0,)], CUDA_12) == 1
    chunk = 65_536
    assert [launches([(chunk * number,)], CUDA_12) for number in (1, 320, 321, 641)] == [1, 1, 2, 3]
    assert [launches([(chunk * 320,), (chunk,)], limits) for limits in (CUDA_12, CUDA_13)] == [2, 1]
    assert launches([(chunk * 319 + 1,)], CUDA_12) == 1


def test_lists_that_differ_take_a_launch_per_tensor():
    x, y = meta((4, 6), (3,)), meta((4, 6), (3,))
    wide = meta((4, 6), (3,), dtype=torch.float64)
    other_order = [torch.empty(6, 4, device="meta").T, y[1]]
    factors = meta((), ())
    assert counted(lambda: torch._foreach_mul_(x, y)).launches_with(CUDA_13) == 1
    assert counted(lambda: torch._foreach_mul_(x, other_order)).launches_with(CUDA_13) == 2
    assert counted(lambda: torch._foreach_mul_(x, wide)).launches_with(CUDA_13) == 2
    assert counted(lambda: torch._foreach_copy_(x, wide)).launches_with(CUDA_13) == 1
    assert counted(lambda: torch._foreach_mul_(x, factors[0])).launches_with(CUDA_13) == 1
    seen = counted(lambda: torch._foreach_addcmul_(x, factors, y))
    assert [seen.launches_with(limits) for limits in (CUDA_13, OLD_TORCH)] == [1, 2]


def test_a_norm_a_dot_and_a_stack_take_several_launches():
    tensors = meta(*[(10,)] * 450)
    assert counted(lambda: torch._foreach_norm(tensors)).launches_with(CUDA_12) == 5 + 2 + 2
    assert counted(lambda: torch._foreach_norm(tensors)).launches_with(CUDA_13) == 1 + 1 + 2
    assert counted(lambda: torch.dot(tensors[0], tensors[1])).launches_with(CUDA_13) == 2
    assert counted(lambda: torch.stack(tensors)).launches_with(CUDA_13) == 4


def test_models_have_the_sizes_that_they_are_known_by():
    sizes = {name: (len(shapes), sum(torch.Size(shape).numel() for shape in shapes)) for name, shapes in MODELS.items()}
    assert sizes["GPT-2 124M"] == (148, 124_439_808)
    assert sizes["Llama 1.24B"] == (146, 1_235_814_400)
    assert sizes["ResNet-50"] == (161, 25_557_032)
    assert sizes["LoRA of 448"] == (448, 7_340_032)
