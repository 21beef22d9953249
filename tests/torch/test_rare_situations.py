"""Situations that few runs meet, each found where it went wrong."""

import copy
import math

import pytest
import schedulefree
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from mechanic import TunerConfig
from mechanic.integrations import readings
from mechanic.torch import Mechanic, layout
from tests.torch.task import backward, digits, mlp, pull, same_bits, scale, snapshot, train


def quadratic(*params):
    return sum(((p.float() - 1.5) ** 2).sum() for p in params)


def test_a_backward_pass_from_before_the_step_fails():
    """As with any optimizer: the values that it was made from are gone."""
    model = mlp()
    optimizer = Mechanic(optim.AdamW(model.parameters(), lr=1.0))
    backward(model, 0)
    stale = model(torch.ones(4, 64)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


# Learning rates.


@pytest.mark.long
def test_a_linear_schedule_that_runs_past_its_end_does_what_it_does_to_a_bare_base():
    """At a negative rate every optimizer ascends. S stays as it is, so it is no worse than at the learned rate."""

    def losses(optimizer, p):
        schedule = LambdaLR(optimizer, lambda t: 1 - t / 100)
        for _ in range(200):
            optimizer.zero_grad()
            loss = ((p - 3) ** 2).sum()
            loss.backward()
            optimizer.step()
            schedule.step()
            yield loss.item()

    p = nn.Parameter(torch.ones(4))
    optimizer = Mechanic(optim.AdamW([p], lr=1.0))
    ours, learned = [], []
    for loss in losses(optimizer, p):
        ours.append(loss)
        learned.append(optimizer.scales()["default"])
    p = nn.Parameter(torch.ones(4))
    bare = list(losses(optim.AdamW([p], lr=learned[-1]), p))
    assert ours[99] < bare[99]
    assert ours[139] < 0.1
    assert ours[199] < 2 * bare[199]
    assert learned[100:] == [learned[100]] * 100
    assert learned[100] > 0


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_at_a_learning_rate_of_zero_nothing_moves_also_before_anything_is_learned(weight_decay):
    p = nn.Parameter(torch.ones(3))
    optimizer = Mechanic(optim.AdamW([p], lr=1.0, weight_decay=weight_decay))
    p.grad = torch.zeros(3)  # no feedback, but weight decay makes Delta move
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    before = p.detach().clone()
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
    assert p.equal(before)


# Iterates of the base's own.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_is_not_trained_stays_where_it_is_when_the_base_goes_to_its_evaluation_point(dtype):
    trained, frozen = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    optimizer = Mechanic(schedulefree.AdamWScheduleFree([trained, frozen], lr=1.0), own_iterates=True)
    optimizer.train()
    for _ in range(20):  # a few more, and bfloat16 is at the optimum, from which nothing moves
        optimizer.zero_grad()
        quadratic(trained, frozen).backward()
        optimizer.step()
    frozen.requires_grad_(False)
    before, moved = frozen.detach().clone(), trained.detach().clone()
    optimizer.eval()
    assert frozen.equal(before)
    assert not trained.equal(moved)
    optimizer.train()
    assert frozen.equal(before)
    frozen.requires_grad_(True)
    for _ in range(10):
        optimizer.zero_grad()
        quadratic(trained, frozen).backward()
        optimizer.step()
    assert [group["params"] for group in optimizer.param_groups] == [[trained, frozen]]
    torch.testing.assert_close(frozen.detach().float(), torch.full((3,), 1.5), rtol=0.05, atol=0)


# Gradients.


def negated(shape):
    return torch.view_as_complex(torch.full((*shape, 2), torch.nan)).conj().imag


BAD = {
    "expanded": lambda p: torch.autograd.grad(p.sum() * torch.nan, p)[0],
    "lazily negated": lambda p: negated(p.shape),
    "plain": lambda p: torch.full_like(p, torch.inf),
}


def test_a_gradient_may_be_lazily_conjugated():
    z, twin = (nn.Parameter(torch.tensor([1 + 2j, 3 - 1j])) for _ in range(2))
    optimizers = [Mechanic(optim.SGD([p], lr=1.0, momentum=0.9, foreach=False)) for p in (z, twin)]
    for _ in range(5):
        for p, optimizer in zip((z, twin), optimizers, strict=True):
            optimizer.zero_grad()
            (p.conj() * (p.detach() - 1)).sum().real.backward()
            assert p.grad.is_conj()
            p.grad = p.grad if p is z else p.grad.resolve_conj()
            optimizer.step()
    assert z.equal(twin)
    assert optimizers[0].scales()["default"] > 0


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_parameters_of_half_precision_move():
    p = nn.Parameter(torch.ones(3, dtype=torch.complex32))
    optimizer = Mechanic(optim.SGD([p], lr=1.0))
    for _ in range(5):
        p.grad = torch.full((3,), 0.1 + 0.2j, dtype=torch.complex32)
        optimizer.step()
    assert optimizer.scales()["default"] > 0
    assert (torch.view_as_real(p.detach().to(torch.complex64) - 1) < 0).all()


def test_a_base_without_a_learning_rate_tells_a_rate():
    class WithoutRate(optim.SGD):
        """As transformers' Adafactor with ``relative_step=True``."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] = 0.1
            super().step(closure)
            for group in self.param_groups:
                group["lr"] = None

    model = mlp()
    base = WithoutRate(model.parameters(), lr=0.1)
    for group in base.param_groups:
        group["lr"] = None
    optimizer = Mechanic(base)
    train(model, optimizer, 5)
    assert optimizer.learning_rates() == optimizer.scales()
    assert optimizer.learning_rates()["default"] == optimizer.scales()["default"] > 0
    assert readings(optimizer)["mechanic/lr"] == optimizer.scales()["default"]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_bad_gradients_whose_memory_cannot_be_written_are_discarded_too():
    for bad in BAD.values():
        p = nn.Parameter(torch.ones(3))
        optimizer = Mechanic(optim.SGD([p], lr=1.0, momentum=0.9))
        for t in range(20):
            p.grad = bad(p) if t == 5 else p.detach() - 3
            optimizer.step()
        assert p.isfinite().all()
        assert optimizer.nonfinite_steps == 1
        assert optimizer.scales()["default"] > 0


def test_a_frozen_scale_still_skips_bad_gradients():
    model = mlp()
    optimizer = Mechanic(optim.AdamW(model.parameters(), lr=1.0), skip_nonfinite=True)
    train(model, optimizer, 5)
    optimizer.freeze()
    before = snapshot(model, optimizer)
    backward(model, 5)
    model[2].bias.grad[0] = torch.nan
    optimizer.step()
    assert same_bits(before, snapshot(model, optimizer))
    assert optimizer.skipped_steps == 1
    train(model, optimizer, 3)
    assert not same_bits(before, snapshot(model, optimizer))
    assert optimizer.skipped_steps == 1


# Parameters that are not trained.


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.bfloat16])
def test_frozen_parameters_of_any_dtype_may_stand_beside_trained_ones(dtype):
    frozen = nn.Parameter(torch.ones(6).to(dtype), requires_grad=False)
    p, alone = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizers = Mechanic(optim.AdamW([p, frozen], lr=1.0)), Mechanic(optim.AdamW([alone], lr=1.0))
    for optimizer in optimizers:
        pull(optimizer, 10)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.freeze()
        pull(optimizer)
    assert p.equal(alone)
    assert frozen.float().equal(torch.ones(6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_expanded_gradients_train_as_others_do(dtype):
    expanded, plain = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    for p in (expanded, plain):
        optimizer = Mechanic(optim.SGD([p], lr=1.0))
        for _ in range(5):
            p.grad = torch.ones((), dtype=dtype).expand(3) if p is expanded else torch.ones(3, dtype=dtype)
            optimizer.step()
    assert expanded.equal(plain)


# Release.


class Lion(optim.Optimizer):
    """A stranger with a known name, whose step goes with the square of lr."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] ** 2 * p.grad.sign())


class SignSGD(Lion):
    """A stranger whose step is proportional to lr."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())


def test_a_stranger_is_not_released_and_can_be_frozen():
    """Not even if it has the name of a base that could be."""
    for cls in (Lion, SignSGD):
        p = nn.Parameter(torch.ones(3))
        optimizer = Mechanic(cls([p], lr=0.5))
        pull(optimizer, 10)
        state = torch.get_rng_state()
        with pytest.raises(TypeError, match="not known to be proportional to lr"):
            optimizer.release()
        optimizer.freeze()
        pull(optimizer)
        assert torch.get_rng_state().equal(state)


# Groups.


def test_names_that_groups_get_and_names_that_they_are_given_do_not_meet():
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Mechanic(optim.SGD([{"params": [first]}, {"params": [second], "tuner": "0"}], lr=1.0), per_group=True)
    assert list(optimizer.scales()) == ["group 0", "0"]
    assert [group["mechanic_row"] for group in optimizer.param_groups] == [0, 1]
    groups = [{"params": [first]}, {"params": [second], "tuner": "group 0"}]
    with pytest.raises(ValueError, match="a group names the tuner 'group 0'"):
        Mechanic(optim.SGD(groups, lr=1.0), per_group=True)


# Small things.


@pytest.mark.parametrize(("has_fp64", "dtype"), [(True, torch.float64), (False, torch.float32)])
def test_intel_gpus_without_float64_keep_the_tuner_in_float32(has_fp64, dtype, monkeypatch):
    properties = type("Properties", (), {"has_fp64": has_fp64})
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    assert layout.tuner_dtype(torch.device("xpu")) == dtype


# Steep losses.


@pytest.mark.long
@pytest.mark.parametrize(
    ("base", "options", "max_norm"),
    [
        pytest.param(optim.AdamW, {}, math.inf, id="AdamW"),
        pytest.param(optim.SGD, {"momentum": 0.9}, 1.0, id="SGD, clipped"),
        pytest.param(
            *(optim.SGD, {"momentum": 0.9}, math.inf),
            id="SGD",
            marks=pytest.mark.xfail(strict=False, reason="S grows too fast: docs/troubleshooting.md, the loss jumps"),
        ),
    ],
)
def test_a_deep_linear_network_does_not_diverge(base, options, max_norm):
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
        target = torch.randn(16, 16) * 0.75
        optimizer = Mechanic(base(model.parameters(), lr=1.0, **options))
        losses = []
        for _ in range(200):
            inputs = torch.randn(8, 16)
            loss = (model(inputs) - inputs @ target - torch.randn(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            losses.append(loss.item())
        assert sum(losses[-20:]) < sum(losses[:20])


@pytest.mark.long
def test_what_is_learned_by_heart_does_not_raise_the_scale():
    """Of 200 images a network can get sure without end. That lowers the train loss, and raises the test loss."""
    images, labels = digits()
    found = {}
    for late_decay in (TunerConfig().late_decay, 0.0):
        model, chosen = mlp(hidden=64), torch.Generator().manual_seed(0)
        optimizer = Mechanic(optim.AdamW(model.parameters(), lr=1.0), config={"late_decay": late_decay})
        schedule = CosineAnnealingLR(optimizer, 1000)
        for _ in range(1000):
            rows = torch.randint(200, (32,), generator=chosen)
            optimizer.zero_grad()
            cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            losses = cross_entropy(model(images), labels, reduction="none")
        train_loss, test_loss = losses[:200].mean().item(), losses[200:].mean().item()
        assert train_loss < 0.01
        found[late_decay] = test_loss, scale(optimizer)
    (test_loss, learned), (test_loss_without, learned_without) = found.values()
    assert test_loss < 0.6 * test_loss_without
    assert learned < 0.5 * learned_without
