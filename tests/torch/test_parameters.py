"""Parameters of every kind: tied, scalar, empty, strided, double, complex, and on several devices."""

import collections

import pytest
import pytorch_optimizer
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mechanic.torch import Mechanic, buckets
from tests.torch.task import assert_go_on_alike, mlp, same_bits, scale, train, values_of


def descend(params, loss, steps=60, **options):
    optimizer = Mechanic(torch.optim.AdamW(params, lr=1.0, weight_decay=0.0), **options)
    first = loss().item()
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return optimizer, first, loss().item()


def test_tied_weights_are_one_parameter():
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, head)
    tokens = torch.arange(7)
    optimizer, first, last = descend(
        model.parameters(), lambda: torch.nn.functional.cross_entropy(model(tokens), tokens.roll(1))
    )
    assert len(optimizer.state) == 1
    assert last < first / 2


def test_strides_do_not_matter():
    torch.manual_seed(0)
    values, target = torch.randn(2, 4, 3, 5, 5, dtype=torch.float64)
    courses = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        weight = torch.nn.Parameter(values.clone(memory_format=memory_format))
        optimizer, _, last = descend([weight], lambda w=weight: (w - target).square().mean())
        assert optimizer.state[weight]["mechanic_delta"].stride() == weight.stride()
        courses.append((scale(optimizer), last))
    assert courses[0] == pytest.approx(courses[1], rel=1e-9)


def test_complex_parameters_follow_their_real_twin():
    """<a, b> is Re<a, b>: SGD on a complex parameter is SGD on its real and imaginary parts."""
    torch.manual_seed(0)
    start, target = torch.randn(2, 6, dtype=torch.complex128)
    weight, twin = torch.nn.Parameter(start), torch.nn.Parameter(torch.view_as_real(start).clone())
    optimizers = [Mechanic(torch.optim.SGD([p], lr=1.0, momentum=0.9)) for p in (weight, twin)]
    for _ in range(50):
        for p, optimizer in zip((weight, twin), optimizers, strict=True):
            optimizer.zero_grad()
            difference = (p if p.is_complex() else torch.view_as_complex(p)) - target
            difference.abs().square().sum().backward()
            optimizer.step()
    assert scale(optimizers[0]) == pytest.approx(scale(optimizers[1]), rel=1e-9)
    torch.testing.assert_close(torch.view_as_real(weight.detach()), twin.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_parameters_on_several_devices():
    """Fake devices check every placement; the arithmetic is the same as on one."""
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.ones(3, device=device)) for device in ("cuda:0", "cuda:1", "cpu")]
        optimizer = Mechanic(torch.optim.SGD(params, lr=1.0, momentum=0.9))
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert optimizer.param_groups[0]["mechanic_tuner"].device == torch.device("cuda:0")
        assert all(optimizer.state[p]["mechanic_delta"].device == p.device for p in params)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_and_the_cpu_together_follow_the_cpu_alone():
    torch.manual_seed(0)
    start = torch.randn(2, 50, dtype=torch.float64)
    results = []
    for devices in (("cuda", "cpu"), ("cpu", "cpu")):
        params = [torch.nn.Parameter(x.to(device)) for x, device in zip(start, devices, strict=True)]
        descend(params, lambda params=params: sum((p.cpu() - 1).square().sum() for p in params))
        results.append(torch.stack([p.detach().cpu() for p in params]))
    torch.testing.assert_close(*results, rtol=1e-9, atol=0)


def test_a_tuner_loaded_on_another_device_follows_the_parameters():
    with FakeTensorMode():
        p = torch.nn.Parameter(torch.ones(3, device="cuda:0"))
        optimizer = Mechanic(torch.optim.AdamW([p], lr=1.0))
        optimizer.param_groups[0]["mechanic_tuner"] = optimizer.param_groups[0]["mechanic_tuner"].to("cpu")
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert optimizer.param_groups[0]["mechanic_tuner"].device == p.device


def test_an_empty_group_and_state_that_is_no_parameters():
    model = mlp()
    optimizer = Mechanic(pytorch_optimizer.SPAM([{"params": []}, {"params": list(model.parameters())}], lr=0.1))
    assert "total_step" in optimizer.state
    assert train(model, optimizer, 60) < 1.0


def test_a_model_may_change_its_dtype_in_mid_training():
    model = mlp()
    optimizer = Mechanic(torch.optim.SGD(model.parameters(), lr=1.0))
    train(model, optimizer, 5)
    model.double()
    train(model, optimizer, 5, first=5)
    assert optimizer.state[model[0].weight]["mechanic_delta"].dtype == torch.float64


def test_frameworks_may_replace_state_and_groups_and_add_to_the_base():
    model, twin_model = mlp(), mlp()
    optimizer = Mechanic(torch.optim.AdamW(list(model[0].parameters()), lr=1.0))
    optimizer.state = collections.defaultdict(dict, optimizer.state)
    optimizer.param_groups = list(optimizer.param_groups)
    optimizer.defaults = dict(optimizer.defaults)
    assert optimizer.base.param_groups is optimizer.param_groups
    optimizer.base.add_param_group({"params": list(model[2].parameters())})
    twin = Mechanic(torch.optim.AdamW([{"params": list(twin_model[i].parameters())} for i in (0, 2)], lr=1.0))
    assert_go_on_alike((model, optimizer), (twin_model, twin), steps=30)


def test_hooks_on_the_base_run_once_per_step_before_and_after_all_parameters_have_moved(monkeypatch):
    monkeypatch.setitem(buckets.PART, "cpu", 100)  # several parts
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = Mechanic(base)
    train(model, optimizer, 5)
    calls = []

    def note(hooked, *_):
        calls.append((hooked, values_of(model)))

    base.register_step_pre_hook(note)
    base.register_step_post_hook(note)
    before = values_of(model)
    train(model, optimizer, 1, first=5)
    assert [hooked for hooked, _ in calls] == [base, base]
    assert same_bits(calls[0][1], before)
    assert same_bits(calls[1][1], [p.detach() for p in model.parameters()])
