"""What Mechanic costs in memory beyond the base: one slot that stays, one copy while it steps."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bases import BY_NAME
from mechanic.torch import Mechanic

SIZES = [(300, 1000), (1000, 300), (1000,)]
PARAM_BYTES = 4 * sum(torch.Size(size).numel() for size in SIZES)


def cost(wrap, base, layout=lambda values: values):
    """Per byte of parameters, as the allocator saw it: what three steps leave, and the most that a fourth takes."""
    params = [torch.nn.Parameter(layout(torch.zeros(size))) for size in SIZES]
    optimizer = wrap(base.make(params))
    for p in params:
        p.grad = torch.ones_like(p)
    kept, _ = allocations(lambda: [optimizer.step() for _ in range(3)])
    _, most = allocations(optimizer.step)
    return kept / PARAM_BYTES, most / PARAM_BYTES


def allocations(run):
    """Bytes allocated by ``run`` and not freed, and the most at any time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    live = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return live, most


@pytest.mark.parametrize("name", ["SGD", "SGD momentum", "SGD fused", "AdamW fused", "AdamW one by one", "Lion"])
def test_one_slot_stays_and_one_copy_comes_and_goes(name):
    base = BY_NAME[name]
    bare_kept, bare_passing = cost(lambda bare: bare, base)
    kept, passing = cost(Mechanic, base)
    assert kept - bare_kept == pytest.approx(1, abs=0.01)
    assert passing <= bare_passing + 1.01


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
    assert most / bytes_ <= 1.01
