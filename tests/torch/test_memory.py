"""What Mechanic costs in memory beyond the base: one slot that stays, copies of one part while it steps."""

import pytest
import torch

from mechanic.torch import Mechanic
from mechanic.torch.buckets import PART
from mechanic.torch.lists import ON_CPU
from tests.torch.bases import BY_NAME
from tests.torch.memory import PARAM_BYTES, allocations, cost

OF_PIECES = 6 * 4 * ON_CPU
OF_A_PART = 4 * PART["cpu"] + OF_PIECES


@pytest.mark.parametrize("name", ["SGD", "SGD momentum", "SGD fused", "AdamW fused", "AdamW one by one", "Lion"])
def test_one_slot_stays_and_the_copies_of_one_part_are_temporary(name):
    base = BY_NAME[name]
    bare_kept, bare_passing = cost(lambda bare: bare, base)
    kept, passing = cost(Mechanic, base)
    assert kept - bare_kept == pytest.approx(1, abs=0.01)
    assert passing <= bare_passing + OF_A_PART / PARAM_BYTES


@pytest.mark.parametrize("layout", ["transposed", "complex"])
def test_other_layouts_take_no_more(layout):
    layouts = {"transposed": lambda values: values.T.contiguous().T, "complex": torch.view_as_complex}
    sizes = [(700, 1000, 2)] if layout == "complex" else [(700, 1000)]
    bytes_ = 4 * torch.Size(sizes[0]).numel()
    p = torch.nn.Parameter(layouts[layout](torch.zeros(sizes[0])))
    optimizer = Mechanic(torch.optim.SGD([p], lr=1.0, foreach=False))
    p.grad = torch.ones_like(p)
    optimizer.step()
    _, most = allocations(optimizer.step)
    assert most <= bytes_ + OF_PIECES


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "kept", "most"), [(torch.float32, 9.05, 10e6), (torch.bfloat16, 7.1, 8e6)], ids=["float32", "bfloat16"]
)
def test_a_delta_in_int8_takes_a_byte_and_what_comes_and_goes_does_not_grow_with_the_model(dtype, kept, most):
    """AdamW has two moments, and of a bfloat16 parameter two bytes are kept that rounding cuts off."""
    passing = []
    for count in (12, 36):
        params = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in [(512, 512), (512,)] * count]
        optimizer = Mechanic(torch.optim.AdamW(params, lr=1.0, fused=True), delta="int8")
        for p in params:
            p.grad = torch.ones_like(p)
        stays, _ = allocations(lambda: [optimizer.step() for _ in range(2)])  # noqa: B023
        assert stays / sum(p.numel() for p in params) <= kept
        passing.append(allocations(optimizer.step)[1])
    assert passing[0] <= most
    assert passing[1] <= passing[0] + 1e5
