"""What a step asks of a GPU, counted without one; docs/gpu.md has the figures and what they assume."""

import pytest
import torch
from torch.optim import SGD, AdamW

from benchmarks.speed.counter import CUDA_12, CUDA_13, Counter, count_step
from benchmarks.speed.launches import MODELS, count
from mechanic.torch import Mechanic

MOST = 320
"""Launches of ours on GPT-2, with the limits of CUDA 13."""

ROWS = [("AdamW fused", "`Mechanic(AdamW fused)`"), ("Muon and AdamW fused", "`Mechanic(Muon and AdamW fused)`")]
BUILDS = {
    "AdamW": lambda p: Mechanic(AdamW(p, lr=1.0, fused=True)),
    "SGD": lambda p: Mechanic(SGD(p, lr=1.0, momentum=0.9, fused=True)),
}
SMALL = [(64, 32), (64,), (), (0,), (32, 64)]


@pytest.mark.long
@pytest.mark.parametrize(("bare", "ours"), ROWS, ids=["AdamW", "Muon"])
def test_a_step_of_gpt_2_takes_few_launches_more_than_the_bases_and_waits_for_nothing(bare, ours):
    if "Muon" in bare and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon from 2.9 on")
    step = count(ours, "GPT-2 124M")
    assert step.host_reads == step.copies_to_device == 0
    assert step.launches_with(CUDA_13) - count(bare, "GPT-2 124M").launches_with(CUDA_13) <= MOST


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BUILDS)
def test_launches_do_not_grow_with_the_number_of_small_tensors(name, dtype):
    few, many = (count_step(BUILDS[name], [(100,)] * number, dtype) for number in (5, 45))
    assert many.launches_with(CUDA_13) == few.launches_with(CUDA_13)
    if dtype == torch.float32:  # in half precision there are views of every tensor
        assert many.calls == few.calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_read_or_copied_with_any_number_of_tuners(dtype):
    def build(params):
        return Mechanic(AdamW([{"params": [p]} for p in params], lr=1.0, fused=True), per_group=True)

    step = count_step(build, SMALL, dtype)
    assert step.host_reads == step.copies_to_device == 0


def test_skipping_reads_one_value():
    step = count_step(lambda p: Mechanic(AdamW(p, lr=1.0, fused=True), skip_nonfinite=True), SMALL)
    assert step.host_reads == 1


# The counter itself.


def counted(function):
    with Counter() as counter:
        function()
    return counter


def meta(*shapes):
    return [torch.empty(shape, device="meta") for shape in shapes]


def test_reads_and_copies_are_counted():
    x, y = meta((), (3,))
    for read in (x.item, lambda: bool(x > 0), lambda: x.cpu(), lambda: torch.empty(()).copy_(x)):
        assert counted(read).host_reads == 1
    for copy in (lambda: torch.ones(3).to("meta"), lambda: y.copy_(torch.ones(3))):
        assert counted(copy).copies_to_device == 1
    assert counted(lambda: y + y).bytes == 2 * 12


def test_launches_of_a_list_are_those_of_its_limits():
    def launches(limits, x, y):
        return counted(lambda: torch._foreach_mul_(x, y)).launches_with(limits)

    assert [launches(CUDA_12, meta(*[(5,)] * n), meta(*[(5,)] * n)) for n in (1, 64, 65)] == [1, 1, 2]
    assert [launches(CUDA_13, meta(*[(5,)] * n), meta(*[(5,)] * n)) for n in (448, 449)] == [1, 2]
    assert launches(CUDA_12, meta((65_536 * 321,)), meta((65_536 * 321,))) == 2
    assert launches(CUDA_13, meta((4, 6), (3,)), [torch.empty(6, 4, device="meta").T, *meta((3,))]) == 2


def test_models_have_the_sizes_that_they_are_known_by():
    sizes = {name: (len(shapes), sum(torch.Size(shape).numel() for shape in shapes)) for name, shapes in MODELS.items()}
    assert sizes["GPT-2 124M"] == (148, 124_439_808)
    assert sizes["LoRA of 448"] == (448, 7_340_032)
