"""The cases in which mechanic-pytorch 0.0.1 fails, run with both: ours passes each of them.

Each case is a function of a way to wrap SGD or AdamW, and raises or asserts. That the peer still fails is
asserted too, so that a case which stops telling them apart is noticed.
"""

import copy
import pickle

import mechanic_pytorch
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from mechanic.torch import Mechanic
from tests.torch.task import backward, mlp, train, train_loss


def ours(cls, params, **options):
    return Mechanic(cls(params, **options))


def theirs(cls, params, **options):
    return mechanic_pytorch.mechanize(cls)(params, **options)


def resumes(wrap):
    model = mlp()
    optimizer = wrap(torch.optim.AdamW, model.parameters(), lr=1.0)
    train(model, optimizer, 5)
    saved = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    resumed = wrap(torch.optim.AdamW, twin.parameters(), lr=1.0)
    resumed.load_state_dict(saved)
    assert train(model, optimizer, 5, first=5) == train(twin, resumed, 5, first=5)


def survives_a_grad_scaler_around_a_fused_base(wrap):
    model = mlp()
    optimizer = wrap(torch.optim.AdamW, model.parameters(), lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(10):
        optimizer.zero_grad()
        backward(model, step)
        scaler.scale(torch.zeros(()))
        if step == 4:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert all(p.isfinite().all() for p in model.parameters())


def takes_a_closure(wrap):
    model = mlp()
    optimizer = wrap(torch.optim.SGD, model.parameters(), lr=1.0)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            return backward(model, step)

        optimizer.step(closure)


def leaves_grad_mode_on_when_a_closure_raises(wrap):
    model = mlp()
    optimizer = wrap(torch.optim.SGD, model.parameters(), lr=1.0)

    def closure():
        raise RuntimeError("bad batch")

    try:
        with pytest.raises(RuntimeError, match="bad batch"):
            optimizer.step(closure)
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def takes_a_group_in_mid_training(wrap):
    model = mlp()
    optimizer = wrap(torch.optim.AdamW, list(model[0].parameters()), lr=1.0)
    train(model, optimizer, 3)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    train(model, optimizer, 3, first=3)


def trains_whatever_the_learning_rate(wrap):
    for cls, lr in ((torch.optim.AdamW, 1e-6), (torch.optim.SGD, 1e-4)):
        model = mlp()
        start = train_loss(model)
        assert train(model, wrap(cls, model.parameters(), lr=lr), 150) < start / 2


def pickles(wrap):
    model = mlp()
    optimizer = wrap(torch.optim.AdamW, model.parameters(), lr=1.0)
    train(model, optimizer, 2)
    pickle.loads(pickle.dumps(optimizer))


def never_waits_for_the_device(wrap):
    with FakeTensorMode():
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = wrap(torch.optim.SGD, [p], lr=1.0)
        p.grad = torch.ones_like(p)
        optimizer.step()


def steps_without_gradients(wrap):
    wrap(torch.optim.AdamW, mlp().parameters(), lr=1.0).step()


CASES = {  # and what the peer does
    resumes: KeyError,
    survives_a_grad_scaler_around_a_fused_base: AssertionError,
    takes_a_closure: RuntimeError,
    leaves_grad_mode_on_when_a_closure_raises: AssertionError,
    takes_a_group_in_mid_training: KeyError,
    trains_whatever_the_learning_rate: AssertionError,
    pickles: (AttributeError, pickle.PicklingError),
    never_waits_for_the_device: DataDependentOutputException,
    steps_without_gradients: (TypeError, AttributeError),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_ours_passes_where_the_peer_fails(case):
    case(ours)
    with pytest.raises(CASES[case]):
        case(theirs)
    torch.set_grad_enabled(True)
