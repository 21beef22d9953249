"""Stepping inside the backward pass: an oracle of its own, what is freed, what goes with it, and what is refused."""

import copy
import functools
import pickle

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch import distributed as dist
from torch import nn
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.checkpoint import checkpoint

from mechanic.torch import Mechanic, MechanicAdamW, Together, layer_groups
from mechanic.torch import backward as in_backward
from tests.shared import oracle
from tests.torch import parallel
from tests.torch.bases import BASES, BY_NAME
from tests.torch.memory import allocations
from tests.torch.oracle_task import BASES as IN_NUMPY
from tests.torch.paths import failing
from tests.torch.task import backward, batch, learned, mlp, same_bits, scale, snapshot, train, values_of
from tests.torch.test_no_sync import take_steps

STEPS = 40


DEFAULT = in_backward.WAITING


@pytest.fixture(autouse=True)
def waiting(monkeypatch, request):
    """By default the parameters of these tests are so small that all would wait for step(). Here none waits."""
    elements = getattr(request, "param", 1)
    monkeypatch.setattr(in_backward, "WAITING", elements)
    return elements


def while_waiting(**elements):
    return pytest.mark.parametrize("waiting", elements.values(), indirect=True, ids=elements)


some_wait = while_waiting(some=100)


class Oracle(oracle.Oracle):
    """Algorithm 1 as it is inside the backward pass: line 9 keeps a share of the newest update as well."""

    def step(self, g):
        u = self.base(self.x, g)  # 7
        before = self.scale
        kept = 1.0
        if np.isfinite(g).all() and g.any():
            self._tune(g, self.x, self.delta)  # 10-16
            kept = self._delta_retention(before)
        self.delta = kept * (self.delta + u)  # 9
        self.x = self.x_ref + self.scale * self.delta  # 17


def shape(step):
    """A warm-up and a descent: k is not 1 in either."""
    return (step + 1) / 10 if step < 10 else 1 - (step - 10) / STEPS


@functools.cache
def course_of_oracle(base):
    """S and all parameters of an MLP, as one vector, after every step."""
    model = mlp(dtype=torch.float64, hidden=8)
    sizes = {name: p.shape for name, p in model.named_parameters()}

    def split(vector):
        parts = torch.tensor(vector).split([size.numel() for size in sizes.values()])
        return {name: part.reshape(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}

    def loss(parameters, images, labels):
        return cross_entropy(functional_call(model, parameters, images), labels)

    def flat(parameters):
        return torch.cat([parameters[name].detach().flatten() for name in sizes]).numpy()

    reference = Oracle(IN_NUMPY[base][0](shape), flat(dict(model.named_parameters())))
    course = []
    for step in range(STEPS):
        reference.step(flat(grad(loss)(split(reference.x), *batch(step, dtype=torch.float64))))
        course.append((reference.scale, reference.x))
    return course


def wrapped_mlp(base="AdamW", *, enabled=True, dtype=torch.float64, **options):
    _, cls, of_base = IN_NUMPY[base]
    model = mlp(dtype=dtype, hidden=8)
    optimizer = Mechanic(cls(model.parameters(), lr=1.0, **of_base), **options)
    optimizer.step_in_backward(enabled)
    return model, optimizer


@pytest.mark.parametrize(
    ("base", "waiting"),
    [("AdamW", 1), ("AdamW", 100), ("AdamW", DEFAULT), ("momentum", 1), ("Lion", 1)],
    indirect=["waiting"],
)
def test_float64_follows_its_oracle(base):
    model, optimizer = wrapped_mlp(base)
    schedule = LambdaLR(optimizer, shape)
    for step, (s, x) in enumerate(course_of_oracle(base)):
        backward(model, step)
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        schedule.step()
        found = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
        assert scale(optimizer) == pytest.approx(s, rel=1e-9)
        assert np.linalg.norm(found - x) <= 1e-9 * np.linalg.norm(x)
    assert s > 0


# Where nothing is forgotten k is 1, and it differs from the usual step by rounding only.


def assert_follows_the_usual_step(make, steps, within=1e-9, train=train):
    """``make`` makes a model, and a base or groups for AdamW. Returns the model and its optimizer."""
    runs = []
    for enabled in (False, True):
        model, base, options = make()
        optimizer = Mechanic(base, config={"forgetting": 0.0}, **options)
        optimizer.step_in_backward(enabled)
        train(model, optimizer, steps)
        runs.append((model, optimizer))
    (twin, usual), (model, ours) = runs
    a, b = (torch.cat([p.detach().flatten().double() for p in each.parameters()]) for each in (model, twin))
    assert (a - b).norm() <= within * b.norm()
    assert ours.scales() == pytest.approx(usual.scales(), rel=within)
    assert [group.get("step") for group in ours.param_groups] == [group.get("step") for group in usual.param_groups]
    return model, ours


@pytest.mark.parametrize(
    "base", [base for base in BASES if base.name != "Lamb"], ids=lambda base: base.name.replace(" ", "-")
)
def test_every_base_follows_the_usual_step(base):
    def make():
        model = base.model(dtype=torch.float64, hidden=8)
        return model, base.make(model.parameters()), {}

    assert_follows_the_usual_step(make, 4)


@some_wait
def test_parameters_without_a_gradient_count_and_move():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.sometimes = mlp(dtype=torch.float64), nn.Linear(64, 10, dtype=torch.float64)

        def forward(self, images, both=True):
            return self.used(images) + self.sometimes(images) if both else self.used(images)

    def make():
        model = Unused()
        return model, torch.optim.AdamW(model.parameters(), lr=1.0), {}

    def train(model, optimizer, steps):
        for step in range(steps):
            images, labels = batch(step, dtype=torch.float64)
            cross_entropy(model(images, both=step % 3 == 1), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = assert_follows_the_usual_step(make, 20, train=train)
    assert optimizer.state[model.sometimes.weight]["mechanic_delta"].any()


@some_wait
def test_several_tuners_groups_with_options_and_optimizers_together_follow_the_usual_step():
    def make_groups():
        model = mlp(dtype=torch.float64)
        groups = layer_groups(model, [{"params": list(model.parameters()), "weight_decay": 0.1, "lr": 0.5}])
        return model, torch.optim.AdamW(groups, lr=1.0), {}

    def make_together():
        model = mlp(dtype=torch.float64)
        matrices, vectors = ([p for p in model.parameters() if p.ndim == dims] for dims in (2, 1))
        bases = BY_NAME["SGD momentum"].make(matrices), torch.optim.AdamW(vectors, lr=1.0)
        return model, Together(*bases), {"per_group": True}

    for make in (make_groups, make_together):
        _, optimizer = assert_follows_the_usual_step(make, 15)
        assert len(set(optimizer.scales().values())) == 2


def test_each_gradient_can_be_clipped_by_a_hook_that_is_registered_before():
    def clip(p):
        nn.utils.clip_grad_norm_([p], 0.01)

    def make():
        model = mlp(dtype=torch.float64)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(clip)
        return model, torch.optim.SGD(model.parameters(), lr=1.0), {}

    assert_follows_the_usual_step(make, 10)


# Memory and storage.


@while_waiting(by_default=DEFAULT)
def test_gradients_are_never_all_there_at_once():
    """The most that a step takes, forward and backward pass included, is less by all gradients but the largest."""

    def most(enabled):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0, fused=True))
        optimizer.step_in_backward(enabled)

        def step():
            model(torch.ones(2, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return allocations(step)[1]

    layer = 4 * 512 * 512
    assert (most(False) - most(True)) / layer >= 6.8


@pytest.mark.long
def test_a_step_does_not_wait_for_the_device():
    def wrap(bare):
        optimizer = Mechanic(bare)
        optimizer.step_in_backward()
        return optimizer

    assert take_steps(wrap, BY_NAME["AdamW"], "cuda") <= take_steps(lambda bare: bare, BY_NAME["AdamW"], "cuda")


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "delta"), [(torch.float32, "int8"), (torch.bfloat16, None)])
def test_every_storage_trains_as_in_the_usual_mode(delta, dtype):
    losses = []
    for enabled in (False, True):
        model = mlp(dtype=dtype)
        optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0), delta=delta)
        optimizer.step_in_backward(enabled)
        losses.append(train(model, optimizer, 60, scheduler=CosineAnnealingLR(optimizer, 60)))
    usual, ours = losses
    assert ours == pytest.approx(usual, rel=0.1)
    assert ours < 0.6


@while_waiting(none=1, some=100, all=DEFAULT)
def test_a_stored_delta_is_rounded_as_in_the_usual_step():
    for delta in (torch.bfloat16, "int8"):
        codes = []
        for enabled in (False, True):
            model = mlp()
            optimizer = Mechanic(torch.optim.SGD(model.parameters(), lr=1.0), delta=delta)
            optimizer.step_in_backward(enabled)
            train(model, optimizer, 1)
            codes.append([optimizer.state[p]["mechanic_delta"] for p in model.parameters()])
        assert same_bits(*codes)


# What was learned, and copies of it.


def test_between_backward_and_step_nothing_is_read_and_nothing_changes():
    (model, optimizer), (twin, other) = wrapped_mlp(), wrapped_mlp()
    train(model, optimizer, 5)
    train(twin, other, 6)
    backward(model, 5)
    looks = Mechanic.state_dict, copy.deepcopy, pickle.dumps, Mechanic.freeze, Mechanic.release
    for look in looks:
        with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\).*Call step\(\) first"):
            look(optimizer)
    optimizer.step()
    assert same_bits(snapshot(model, optimizer), snapshot(twin, other))
    for look in looks:
        look(optimizer)


@pytest.mark.parametrize("base", ["AdamW", "Lion"])
def test_a_frozen_one_steps_in_the_backward_pass(base):
    found = []
    for enabled in (False, True):
        model = mlp(dtype=torch.float64)
        optimizer = Mechanic(BY_NAME[base].make(model.parameters()))
        train(model, optimizer, 20)
        optimizer.zero_grad()
        optimizer.freeze()
        optimizer.step_in_backward(enabled)
        backward(model, 20)
        assert all((p.grad is None) == enabled for p in model.parameters())
        optimizer.step()
        train(model, optimizer, 3, first=21)
        found.append(snapshot(model, optimizer))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*found, strict=True))


def test_a_frozen_one_tells_the_learning_rate_of_groups_without_a_gradient_as_well():
    model = mlp()
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 1.0, "tuner": "first"}, {"params": others, "tuner": "others"}]
    optimizer = Mechanic(torch.optim.AdamW(groups, lr=0.5))
    train(model, optimizer, 5)
    optimizer.freeze()
    scales = optimizer.scales()
    optimizer.step_in_backward()
    first.requires_grad_(False)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    backward(model, 5)
    optimizer.step()
    assert optimizer.learning_rates() == {name: scale / 2 for name, scale in scales.items()}


@some_wait
def test_frozen_in_the_middle_it_keeps_stepping_and_after_release_gradients_stay_for_the_base():
    model, optimizer = wrapped_mlp()
    train(model, optimizer, 20)
    optimizer.freeze()
    before = values_of(model)
    backward(model, 20)
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert not any(p.equal(b) for p, b in zip(model.parameters(), before, strict=True))
    base = optimizer.release()
    backward(model, 21)
    assert all(p.grad is not None for p in model.parameters())
    base.step()


def test_it_can_be_turned_off_again_and_ends_with_its_optimizer():
    model, optimizer = wrapped_mlp()
    train(model, optimizer, 3)
    optimizer.step_in_backward(False)
    backward(model, 3)
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step_in_backward()
    del optimizer
    backward(model, 4)
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_that_are_added_or_thawed_join_in():
    model, extra = mlp(dtype=torch.float64), nn.Parameter(torch.zeros(10, dtype=torch.float64))
    model[0].weight.requires_grad = False
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
    optimizer.step_in_backward()

    def one_step(step):
        images, labels = batch(step, dtype=torch.float64)
        cross_entropy(model(images) + extra, labels).backward()
        left = [p.grad is not None for p in (model[0].weight, extra)]
        optimizer.step()
        optimizer.zero_grad()
        return left

    assert one_step(0) == [False, True]
    extra.grad = None
    model[0].weight.requires_grad = True
    optimizer.add_param_group({"params": [extra]})
    assert one_step(1) == [True, True]  # they have no hook yet, and step() takes them
    assert one_step(2) == [False, False]
    assert all(optimizer.state[p]["mechanic_delta"].any() for p in (model[0].weight, extra))


# What goes wrong.


def test_a_gradient_that_is_not_finite_moves_nothing_of_its_parameter_and_tunes_nothing():
    model, optimizer = wrapped_mlp("momentum", config={"forgetting": 0.0})
    train(model, optimizer, 10)
    bad, others = model[0].weight, [p for p in model.parameters() if p is not model[0].weight]
    handle = bad.register_hook(lambda g: torch.where(torch.ones_like(g).cumsum(0) == 1, float("nan"), g))
    before, then = [p.detach().clone() for p in others], learned(optimizer)
    velocity, at = optimizer.state[bad]["momentum_buffer"].clone(), bad.detach().clone()
    backward(model, 10)
    optimizer.step()
    handle.remove()
    assert learned(optimizer).equal(then)
    assert optimizer.nonfinite_steps == 1
    # A gradient of zeros: the base goes on with its momentum alone.
    torch.testing.assert_close(bad.detach(), at - scale(optimizer) * 0.9 * velocity, rtol=1e-9, atol=1e-12)
    assert not any(p.equal(b) for p, b in zip(others, before, strict=True))
    train(model, optimizer, 5, first=11)
    assert all(p.isfinite().all() for p in model.parameters())


@some_wait
def test_a_backward_pass_that_is_broken_off_can_be_forgotten():
    model, optimizer = wrapped_mlp()
    train(model, optimizer, 5)

    def fail(grad):
        raise MemoryError("out of memory")

    handle = model[0].weight.register_hook(fail)
    then = learned(optimizer)
    with pytest.raises(MemoryError):
        backward(model, 5)
    handle.remove()
    optimizer.zero_grad()
    optimizer.step()
    assert learned(optimizer).equal(then)
    assert train(model, optimizer, 41, first=5) < 1.0


def test_a_missing_step_is_told_once():
    model = mlp()
    optimizer = MechanicAdamW(model.parameters())
    optimizer.step_in_backward()
    backward(model, 0)
    with pytest.warns(UserWarning, match=r"not called before zero_grad\(\).* call step\(\) after backward\(\)"):
        optimizer.zero_grad()
    backward(model, 1)
    optimizer.zero_grad()
    train(model, optimizer, 2)


def test_a_base_that_fails_has_moved_only_parameters_that_came_before():
    model, optimizer = wrapped_mlp()
    train(model, optimizer, 5)
    before = values_of(model)
    with failing(optimizer.base, ArithmeticError("no"), share=0.0), pytest.raises(ArithmeticError):
        backward(model, 5)
    for p, b in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), b, rtol=1e-12, atol=1e-12)


# Trainers.


def hooks_that_free_the_gradient(model, optimizer):
    def on_gradient(tensor):
        optimizer.take_gradient(tensor)
        tensor.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(on_gradient)
    train(model, optimizer, 5)


def hooks_of_torchs_tutorial(model, optimizer):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(optimizer.take_gradient)
    train(model, optimizer, 5)


def a_closure(model, optimizer):
    def closure(step):
        optimizer.zero_grad()
        return backward(model, step)

    optimizer.step_in_backward()
    assert all(optimizer.step(functools.partial(closure, step)) > 0 for step in range(5))


def activations_that_are_computed_again(model, optimizer, *, reentrant=False):
    optimizer.step_in_backward()
    for step in range(5):
        images, labels = batch(step, dtype=torch.float64)
        hidden = checkpoint(model[:2], images.requires_grad_(), use_reentrant=reentrant)
        cross_entropy(checkpoint(model[2], hidden, use_reentrant=reentrant), labels).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "trainer",
    [
        *(hooks_that_free_the_gradient, hooks_of_torchs_tutorial, a_closure, activations_that_are_computed_again),
        functools.partial(activations_that_are_computed_again, reentrant=True),
    ],
)
def test_every_trainer_makes_the_same_step(trainer):
    (model, optimizer), (twin, other) = wrapped_mlp(enabled=False), wrapped_mlp()
    trainer(model, optimizer)
    train(twin, other, 5)
    assert same_bits(snapshot(model, optimizer), snapshot(twin, other))


@some_wait
def test_options_assigned_after_the_backward_pass_stay_and_count_from_the_next_step_on():
    """The parameters whose gradients have come have been stepped already."""
    model, optimizer = wrapped_mlp()
    twin, other = wrapped_mlp()
    lrs = [1.0, 0.5, 0.25, 0.125]
    for step, lr in enumerate(lrs):
        backward(model, step)
        for group in optimizer.param_groups:
            group.update(lr=lrs[min(step + 1, 3)], of_the_user=step)
        optimizer.step()
        assert [(group["lr"], group["of_the_user"]) for group in optimizer.param_groups] == [
            (lrs[min(step + 1, 3)], step) for _ in optimizer.param_groups
        ]
        for group in other.param_groups:
            group["lr"] = lr
        backward(twin, step)
        other.step()
    assert same_bits(snapshot(model, optimizer), snapshot(twin, other))
    assert optimizer.learning_rates() == other.learning_rates()


# What is refused.


def test_gradients_cannot_be_accumulated():
    model, _optimizer = wrapped_mlp()
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"a second gradient of a parameter has come before step\(\)"):
        backward(model, 1)


def test_held_out_gradients_cannot_be_observed():
    model, optimizer = wrapped_mlp()
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"observe\(\) needs gradients that are still there"):
        optimizer.observe()
    model, optimizer = wrapped_mlp(enabled=False)
    backward(model, 0)
    optimizer.observe()
    backward(model, 1)
    with pytest.raises(RuntimeError, match=r"observe\(\) needs gradients"):
        optimizer.take_gradient(model[0].weight)


def test_steps_that_may_be_skipped_are_refused():
    model, optimizer = wrapped_mlp(enabled=False, skip_nonfinite=True)
    backward(model, 0)
    for call in (optimizer.step_in_backward, functools.partial(optimizer.take_gradient, model[0].weight)):
        with pytest.raises(ValueError, match="skip_nonfinite=True needs all gradients"):
            call()
    optimizer.step()


def test_bases_that_look_at_several_parameters_are_refused():
    norm_of_all = functools.partial(pytorch_optimizer.Lamb, pre_norm=True)
    model = mlp()
    optimizer = Mechanic(norm_of_all(model.parameters(), lr=1.0))
    with pytest.raises(TypeError, match="is not known to step every parameter by itself"):
        optimizer.step_in_backward()
    backward(model, 0)
    assert all(p.grad is not None for p in model.parameters())


def test_a_gradient_scaler_is_told_that_there_is_nothing_to_unscale():
    model, optimizer = wrapped_mlp(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu")
    images, labels = batch(0)
    scaler.scale(cross_entropy(model(images), labels)).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


def test_a_step_inside_the_backward_pass_waits_for_all_gradients():
    model, optimizer = wrapped_mlp()
    model[2].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(RuntimeError, match=r"step\(\) was called inside the backward pass, while"):
        backward(model, 0)


def test_parameters_of_others_are_refused():
    _, optimizer = wrapped_mlp()
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) is not one that this optimizer trains"):
        optimizer.take_gradient(p)


# Over processes.


def ranks_that_reduce_gradients_later_are_refused():
    for make, options in (
        (nn.parallel.DistributedDataParallel, {}),
        (functools.partial(parallel.flat, use_orig_params=True), {"process_group": dist.group.WORLD}),
    ):
        optimizer = Mechanic(torch.optim.AdamW(make(parallel.Model()).parameters(), lr=1.0), **options)
        assert "DataParallel reduce gradients after the hooks" in parallel.message_of(optimizer.step_in_backward)


@pytest.mark.long
def test_sharded_parameters_follow_one_process_and_ddp_is_refused(tmp_path):
    follow = functools.partial(parallel.follow, in_backward=True)
    jobs = [functools.partial(follow, layout) for layout in ("fsdp2", "hsdp", "tp")]
    jobs += [functools.partial(follow, "fsdp2", "SGD momentum", per_group=False)]
    jobs += [functools.partial(parallel.one_bad_rank, in_backward=True), ranks_that_reduce_gradients_later_are_refused]
    parallel.run(2, tmp_path / "ranks", jobs)
