"""What is easily done wrong is told, once, with what to do instead."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, OneCycleLR

from mechanic.integrations import readings
from mechanic.torch import Mechanic
from tests.torch.task import backward, mlp, train


def one_parameter(**options):
    p = nn.Parameter(torch.ones(3))
    return p, Mechanic(optim.AdamW([p], lr=1.0), **options)


def step(p, optimizer, grad=1.0):
    p.grad = torch.full_like(p, grad)
    optimizer.step()


# Warnings.


@pytest.mark.parametrize(("bad", "skip"), [(float("inf"), False), (float("nan"), True)])
def test_gradients_that_are_never_finite_are_told_once_and_counted(bad, skip):
    p, optimizer = one_parameter(skip_nonfinite=skip)
    for _ in range(9):
        step(p, optimizer, bad)
    with pytest.warns(UserWarning, match=r"10 of 10 steps so far had NaN or inf gradients.*scaler\.step\(optimizer\)"):
        step(p, optimizer, bad)
    step(p, optimizer, bad)
    assert optimizer.nonfinite_steps == 11
    assert readings(optimizer)["mechanic/nonfinite_steps"] == 11
    assert optimizer.skipped_steps == (11 if skip else 0)


def test_now_and_then_a_bad_gradient_is_counted_and_not_told():
    p, optimizer = one_parameter()
    for t in range(60):
        step(p, optimizer, float("nan") if t % 3 == 0 else 1.0)
    assert optimizer.nonfinite_steps == 20


def test_the_count_is_kept_on_the_device_and_in_the_checkpoint():
    p, optimizer = one_parameter()
    step(p, optimizer, float("inf"))
    q, twin = one_parameter()
    twin.load_state_dict(optimizer.state_dict())
    step(q, twin, float("inf"))
    assert twin.nonfinite_steps == 2


def spike(p, optimizer, times=1e6, steps=100):
    for t in range(steps):
        step(p, optimizer, math.sin(t) + 2)
    step(p, optimizer, times)


@pytest.mark.parametrize("layout", ["one", "two tuners", "int8"])
def test_one_gradient_that_outweighs_all_others_is_told_once(layout):
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [q]}, {"params": [p]}] if layout == "two tuners" else [p]
    options = {"one": {}, "two tuners": {"per_group": True}, "int8": {"delta": "int8"}}[layout]
    optimizer = Mechanic(optim.AdamW(groups, lr=1.0), **options)
    with pytest.warns(UserWarning, match=r"one step outweighs .* all others together.*clip_grad_norm_"):
        spike(p, optimizer)
    step(p, optimizer, 1e9)
    optimizer.scales()


def test_a_large_gradient_is_told_where_the_scales_are_read_if_the_step_did_not_read_them(monkeypatch):
    """As on a GPU, where a step reads nothing."""
    p, optimizer = one_parameter()
    with monkeypatch.context() as patched:
        patched.setattr("mechanic.torch.wrapped.is_on_host", lambda tensor: False)
        spike(p, optimizer)
    with pytest.warns(UserWarning, match="one step outweighs"):
        optimizer.scales()


def test_a_gradient_a_hundred_times_as_large_needs_no_word():
    p, optimizer = one_parameter()
    spike(p, optimizer, 100.0)
    optimizer.scales()


def shrink(bounds, steps=60):
    p = nn.Parameter(torch.ones(3))
    optimizer = Mechanic(optim.AdamW([p], lr=1.0), config=bounds)
    for _ in range(steps):
        p.grad = p.detach().clone()
        optimizer.step()
    return optimizer.scales()["default"]


@pytest.mark.parametrize(("bounds", "end"), [({"max_lr": 1e-3}, 1e-3), ({"min_lr": 10.0}, 10.0)], ids=["cap", "floor"])
def test_a_bound_that_holds_the_scale_is_told_once(bounds, end):
    with pytest.warns(UserWarning, match=r"S is held by a bound, min_lr=.* max_lr=.*Widen the bound") as told:
        assert shrink(bounds) == pytest.approx(end)
    assert len(told) == 1


def test_a_bound_out_of_reach_or_that_holds_only_while_the_scale_finds_its_size_needs_no_word():
    assert shrink({"min_lr": 10.0}, steps=50) == pytest.approx(10.0)
    assert 1e-9 < shrink({"min_lr": 1e-9, "max_lr": 1e9}) < 1e9


def test_a_scheduler_with_a_learning_rate_of_its_own_is_told_once():
    p, optimizer = one_parameter()
    schedule = CyclicLR(optimizer, base_lr=1e-4, max_lr=1e-2, cycle_momentum=False)
    with pytest.warns(UserWarning, match=r"starts from a learning rate of 0\.0001, not from the 1 .*peak_lr="):
        step(p, optimizer)
    schedule.step()
    step(p, optimizer)


def test_other_schedulers_need_no_word():
    for schedule in (
        lambda o: CosineAnnealingLR(o, 10),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: LambdaLR(o, lambda t: (t + 1) / 10),
    ):
        p, optimizer = one_parameter()
        scheduler = schedule(optimizer)
        for _ in range(3):
            step(p, optimizer)
            scheduler.step()


def test_with_the_peak_given_a_cyclic_scheduler_needs_no_word():
    p = nn.Parameter(torch.ones(3))
    optimizer = Mechanic(optim.AdamW([p], lr=1.0), peak_lr=1e-2)
    CyclicLR(optimizer, base_lr=1e-4, max_lr=1e-2, cycle_momentum=False)
    step(p, optimizer)


# The learning rate reported is that of the step that was made.


def test_after_the_last_step_of_a_schedule_the_rate_is_that_of_the_last_step():
    model = mlp()
    optimizer = Mechanic(optim.AdamW(model.parameters(), lr=0.5))
    schedule = LambdaLR(optimizer, lambda t: 1 - t / 10)
    for t in range(10):
        optimizer.zero_grad()
        backward(model, t)
        optimizer.step()
        at_the_step = optimizer.learning_rates()["default"]
        schedule.step()
        assert optimizer.learning_rates()["default"] == at_the_step
    assert at_the_step == pytest.approx(0.1 * optimizer.scales()["default"])
    assert readings(optimizer)["mechanic/lr"] == at_the_step > 0


# Messages.


def test_a_parameter_that_has_changed_its_shape():
    p, optimizer = one_parameter()
    step(p, optimizer)
    p.data = torch.ones(5)
    with pytest.raises(ValueError, match=r"shape \(5,\) now, and its state 'mechanic_delta' still \(3,\)"):
        step(p, optimizer)


def test_parameters_built_on_the_meta_device_and_filled_later():
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    optimizer = Mechanic(optim.SGD(model.parameters(), lr=1.0))
    for p in model.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(torch.ones(p.shape)))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    assert optimizer.scales()["default"] > 0


def test_a_released_mechanic_says_so():
    model = mlp()
    optimizer = Mechanic(optim.AdamW(model.parameters(), lr=1.0))
    train(model, optimizer, 3)
    optimizer.release()
    for call in (
        *(optimizer.step, optimizer.scales, optimizer.learning_rates, optimizer.observe, optimizer.freeze),
        *(optimizer.release, lambda: optimizer.nonfinite_steps),
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    ):
        with pytest.raises(RuntimeError, match=r"this Mechanic has been released; use the optimizer that release"):
            call()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from mechanic import Mechanic", "write `from mechanic.torch import Mechanic`, or `from mechanic.jax import"),
        ("from mechanic import MechanicAdamW", "write `from mechanic.torch import MechanicAdamW`"),
        ("import sys; sys.modules['torch'] = None; import mechanic.torch", 'pip install "mechanic[torch]"'),
    ],
)
def test_imports_that_cannot_work_say_what_does(statement, message):
    run = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert message in run.stderr.splitlines()[-1]


def test_warnings_name_the_line_of_the_user():
    model = mlp()
    optimizer = Mechanic(optim.SGD(model.parameters(), lr=1.0))
    plain = optim.SGD(model.parameters(), lr=1.0).state_dict()
    with pytest.warns(UserWarning, match="fresh tuner") as caught:
        optimizer.load_state_dict(plain)
    assert caught[0].filename == __file__
