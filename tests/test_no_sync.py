"""A step never waits for the device: under FakeTensorMode reading a value on the host raises."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from bases import Base, every_base
from mechanic.torch import Mechanic


def take_steps(wrap, base, device):
    with FakeTensorMode():
        shapes = [(8, 4), (4, 8)] if base.matrices_only else [(8, 4), (8,), ()]
        params = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
        optimizer = wrap(base.make(params))
        for step in range(3):
            for p in params[step % 2 :]:  # also without some gradient
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()


@every_base
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_base_makes_the_step_wait(base: Base, device):
    try:
        take_steps(lambda bare: bare, base, device)
    except Exception as error:
        pytest.skip(f"a bare {base.name} does not complete either: {type(error).__name__}: {error}")
    take_steps(Mechanic, base, device)


def test_the_check_can_fail():
    class Nosy(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure) or self.param_groups[0]["params"][0].sum().item()

    with FakeTensorMode():
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = Mechanic(Nosy([p], lr=1.0))
        p.grad = torch.ones_like(p)
        with pytest.raises(DataDependentOutputException):
            optimizer.step()
