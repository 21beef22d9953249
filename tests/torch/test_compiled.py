"""compile=True: the same course as the eager step, compiled once whatever happens while training."""

import copy
import inspect
import warnings

import pytest
import pytorch_optimizer
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic.torch import Mechanic, MechanicAdamW
from mechanic.torch.kernels import compiled
from tests.torch.task import backward, mlp, same_bits, scale, snapshot, train

WHOLE = {
    "AdamW": lambda params: AdamW(params, lr=0.5, weight_decay=0.1),
    "AdamW fused": lambda params: AdamW(params, lr=1.0, fused=True),
    "Adam with L2": lambda params: Adam(params, lr=1.0, weight_decay=1e-3),
    "SGD": lambda params: SGD(params, lr=1.0, weight_decay=1e-3),
    "SGD momentum": lambda params: SGD(params, lr=1.0, momentum=0.9, dampening=0.1),
    "SGD nesterov": lambda params: SGD(params, lr=1.0, momentum=0.9, nesterov=True, weight_decay=1e-3),
}
AROUND = {
    "Lion": lambda params: pytorch_optimizer.Lion(params, lr=1.0),
    "RAdam, on Delta": lambda params: torch.optim.RAdam(params, lr=1.0, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW amsgrad": lambda params: AdamW(params, lr=1.0, amsgrad=True),
}
LONG_AND_SHORT = 600  # hidden units: one weight is long enough for a call of its own, the others are joined


def wide(dtype=torch.float64):
    return mlp(hidden=LONG_AND_SHORT, dtype=dtype)


def distance(a, b):
    """Relative, between the parameters of two models."""
    return max(((p - q).norm() / q.norm()).item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


def course(make, *, compile, dtype=torch.float64, steps=40):  # noqa: A002
    """Gradients come and go, one group's parameters stop and thaw, a schedule runs, one batch is bad."""
    model = wide(dtype)
    optimizer = Mechanic(make(model.parameters()), compile=compile)
    schedule = CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        if step % 5 == 3:
            model[0].weight.grad = None
        if step % 7 == 3:
            model[2].bias.grad = None
        if step == 11:
            model[2].weight.grad[0, 0] = float("nan")
        model[0].bias.requires_grad_(step % 9 != 5)
        optimizer.step()
        schedule.step()
    return model, optimizer


@pytest.mark.parametrize("name", WHOLE)
def test_in_one_graph_it_follows_the_eager_step(name):
    eager, eager_optimizer = course(WHOLE[name], compile=False)
    model, optimizer = course(WHOLE[name], compile=True)
    assert scale(optimizer) == pytest.approx(scale(eager_optimizer), rel=1e-9)
    assert distance(model, eager) <= 1e-9


@pytest.mark.filterwarnings("ignore:compile=True compiles around")
@pytest.mark.parametrize("name", AROUND)
def test_around_a_base_it_follows_the_eager_step(name):
    eager, eager_optimizer = course(AROUND[name], compile=False)
    model, optimizer = course(AROUND[name], compile=True)
    assert scale(optimizer) == pytest.approx(scale(eager_optimizer), rel=1e-9)
    assert distance(model, eager) <= 1e-9


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_in_float32_a_step_differs_in_the_last_digits_only(name):
    """Step by step from the same state: over many steps chaos, not the arithmetic, would be compared."""
    eager, eager_optimizer = course(WHOLE[name], compile=False, dtype=torch.float32, steps=20)
    model = wide(torch.float32)
    optimizer = Mechanic(WHOLE[name](model.parameters()), compile=True)
    for step in range(20, 30):
        model.load_state_dict(eager.state_dict())
        optimizer.load_state_dict(copy.deepcopy(eager_optimizer.state_dict()))
        train(model, optimizer, 1, first=step)
        train(eager, eager_optimizer, 1, first=step)
        assert scale(optimizer) == pytest.approx(scale(eager_optimizer), rel=1e-6)
        assert distance(model, eager) <= 1e-6


def compiling_fails():
    if hasattr(torch.compiler, "set_stance"):  # since torch 2.6
        return torch.compiler.set_stance("fail_on_recompile")
    return torch._dynamo.config.patch(error_on_recompile=True)


def test_nothing_is_compiled_again():
    for name in ("AdamW", "SGD momentum"):
        course(WHOLE[name], compile=True, steps=1)
    with compiling_fails():
        for name in ("AdamW", "SGD momentum"):
            course(WHOLE[name], compile=True)
        other = mlp(hidden=700, dtype=torch.float64, seed=1)
        groups = [{"params": list(layer.parameters()), "lr": 0.1 + i} for i, layer in enumerate((other[0], other[2]))]
        train(other, Mechanic(AdamW(groups), per_group=True, compile=True), 5)


def test_hundreds_of_tensors_take_one_kernel():
    model = torch.nn.Sequential(*(torch.nn.Linear(20 + i % 3, 20 + (i + 1) % 3) for i in range(150))).double()
    course(WHOLE["AdamW"], compile=True, steps=2)
    with compiling_fails():
        optimizer = MechanicAdamW(model.parameters(), lr=1.0, compile=True)
        for _ in range(3):
            model(torch.ones(4, 20, dtype=torch.float64)).square().sum().backward()
            optimizer.step()


@pytest.mark.parametrize("name", WHOLE)
def test_the_state_is_that_of_the_base(name):
    models = [wide(), wide()]
    optimizers = [Mechanic(WHOLE[name](m.parameters()), compile=c) for m, c in zip(models, (False, True), strict=True)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 5)
    plain, ours = (optimizer.state_dict() for optimizer in optimizers)
    assert ours["state"].keys() == plain["state"].keys()
    for key, entry in ours["state"].items():
        assert entry.keys() == plain["state"][key].keys()
        for field, value in entry.items():
            if torch.is_tensor(value):
                other = plain["state"][key][field]
                assert (value.dtype, value.shape, value.stride()) == (other.dtype, other.shape, other.stride())
    # And either goes on from the other's.
    optimizers[0].load_state_dict(copy.deepcopy(ours))
    optimizers[1].load_state_dict(copy.deepcopy(plain))
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 2, first=5)


def test_a_resumed_run_continues_bit_for_bit():
    model, optimizer = course(WHOLE["AdamW"], compile=True, steps=5)
    twin = wide()
    other = Mechanic(WHOLE["AdamW"](twin.parameters()), compile=True)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, opt in ((model, optimizer), (twin, other)):
        train(m, opt, 5, first=5)
    assert same_bits(snapshot(model, optimizer), snapshot(twin, other))


@pytest.mark.parametrize("compile", [False, True])
def test_a_backward_pass_from_before_the_step_fails(compile):  # noqa: A002
    model = wide()
    optimizer = Mechanic(WHOLE["AdamW"](model.parameters()), compile=compile)
    backward(model, 0)
    stale = model(torch.ones(4, 64, dtype=torch.float64)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_it_says_what_is_not_compiled_and_why():
    half = mlp(dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"leaves torch\.bfloat16 parameters to the eager step"):
        train(half, Mechanic(AdamW(half.parameters(), lr=1.0), compile=True), 2)
    eager = mlp(dtype=torch.bfloat16)
    train(eager, Mechanic(AdamW(eager.parameters(), lr=1.0)), 2)
    assert all(p.equal(q) for p, q in zip(half.parameters(), eager.parameters(), strict=True))
    model = mlp()
    optimizer = Mechanic(AROUND["Lion"](model.parameters()), compile=True)
    with pytest.warns(UserWarning, match="around the base, not together with it: Lion is not one of"):
        train(model, optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 1, first=1)  # once is enough


def test_without_a_compiler_it_warns_and_steps_eagerly(monkeypatch):
    monkeypatch.setattr(
        compiled, "reason_not_to_compile", lambda: "torch.compile fails with RuntimeError: no C++ compiler"
    )
    model, eager = mlp(), mlp()
    with pytest.warns(UserWarning, match=r"has no effect: .* no C\+\+ compiler"):
        train(model, Mechanic(AdamW(model.parameters(), lr=1.0), compile=True), 3)
    train(eager, Mechanic(AdamW(eager.parameters(), lr=1.0)), 3)
    assert same_bits([*model.parameters()], [*eager.parameters()])


def test_the_arguments_of_torchs_older_adamw_are_known(monkeypatch):
    """Until torch 2.6 AdamW had a flag among the lists that its _init_group fills."""
    present = torch.optim.AdamW._init_group
    is_older = "amsgrad" in inspect.signature(present).parameters

    def older(self, group, params_with_grad, grads, amsgrad, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps):
        assert amsgrad is False
        flag = (amsgrad,) if is_older else ()
        lists = exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
        return present(self, group, params_with_grad, grads, *flag, *lists)

    models = mlp(), mlp()
    optimizers = [Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0), compile=True) for model in models]
    train(models[0], optimizers[0], 3)
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", older)
    train(models[1], optimizers[1], 3)
    assert same_bits(snapshot(models[0], optimizers[0]), snapshot(models[1], optimizers[1]))
