"""What steps allocate, as the allocator sees it."""

import torch
from torch.profiler import ProfilerActivity, profile

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
