"""A step never waits for the device: under FakeTensorMode reading a value on the host raises."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mechanic.torch import Mechanic
from tests.torch.bases import Base
from tests.torch.paths import every_start


class CopiesToHost(TorchDispatchMode):
    """Counts copies from the device to the host: they wait as well, but are no error to FakeTensorMode."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source = args[1] if func.overloadpacket is torch.ops.aten.copy_ else args[0]
            self.count += source.device.type == "cuda" and result.device.type == "cpu"
        return result


def take_steps(wrap, base, device):
    """Three steps; returns how often something was copied to the host."""
    with FakeTensorMode(), CopiesToHost() as copies:
        shapes = [(8, 4), (4, 8)] if base.matrices_only else [(8, 4), (8,), ()]
        params = [torch.nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
        optimizer = wrap(base.make(params))
        for step in range(3):
            for p in params[step % 2 :]:  # also without some gradient
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
    return copies.count


ASKS_FOR_CUDA = {"Rprop", "SGD fused", "Adagrad fused"}  # these look for a real device where parameters are on one


@pytest.mark.long
@every_start
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_base_makes_the_step_wait(base: Base, wrap, device):
    if device == "cuda" and base.name in ASKS_FOR_CUDA and not torch.cuda.is_available():
        pytest.skip(f"{base.name} does not step on a fake GPU where there is no real one")
    try:
        copied_bare = take_steps(lambda bare: bare, base, device)
    except DataDependentOutputException:
        pytest.skip(f"a bare {base.name} waits by itself")
    assert take_steps(wrap, base, device) <= copied_bare


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
