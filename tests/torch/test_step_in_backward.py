"""Stepping inside the backward pass: an oracle of its own, what is freed, what goes with it, and what is refused."""

import copy
import functools
import pickle

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.checkpoint import checkpoint

from mechanic import TunerConfig
from mechanic.torch import Mechanic, MechanicAdamW, Together, layer_groups
from mechanic.torch import backward as in_backward
from tests.shared import oracle
from tests.torch import parallel_backward
from tests.torch.bases import BASES, BY_NAME
from tests.torch.memory import allocations
from tests.torch.paths import by_default, failing
from tests.torch.task import backward, batch, learned, mlp, same_bits, scale, snapshot, train
from tests.torch.test_no_sync import take_steps
from tests.torch.test_parallel import assert_followed, run

STEPS = 40


DEFAULT = in_backward.WAITING


@pytest.fixture(autouse=True)
def waiting(monkeypatch, request):
    """By default the parameters of these tests are so small that all would wait for step(). Here none waits."""
    elements = getattr(request, "param", 1)
    monkeypatch.setattr(in_backward, "WAITING", elements)
    return elements


some_wait = pytest.mark.parametrize("waiting", [1, 100, DEFAULT], indirect=True, ids=["none", "some", "all"])


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


IN_NUMPY = {
    "AdamW": (lambda lr: oracle.AdamW(lr, weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
    "momentum": (lambda lr: oracle.SGD(lr, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "Lion": (
        lambda lr: oracle.Lion(lr, weight_decay=0.1),
        pytorch_optimizer.Lion,
        {"weight_decay": 0.1, "weight_decouple": True},
    ),
}


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


def wrapped_mlp(base="AdamW", wrap=by_default, *, enabled=True, dtype=torch.float64, hidden=8, **options):
    _, cls, of_base = IN_NUMPY[base]
    model = mlp(dtype=dtype, hidden=hidden)
    optimizer = wrap(cls(model.parameters(), lr=1.0, **of_base), **options)
    optimizer.step_in_backward(enabled)
    return model, optimizer


def distance(model, twin):
    a, b = (torch.cat([p.detach().flatten().double() for p in each.parameters()]) for each in (model, twin))
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(
    ("base", "wrap", "waiting"),
    [
        *(("AdamW", by_default, waiting) for waiting in (1, 100, DEFAULT)),
        *(("momentum", by_default, waiting) for waiting in (1, 100)),
        ("Lion", by_default, 1),
    ],
    indirect=["waiting"],
)
def test_float64_follows_its_oracle(base, wrap):
    model, optimizer = wrapped_mlp(base, wrap)
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


@pytest.mark.parametrize(
    "base", [base for base in BASES if base.name != "Lamb"], ids=lambda base: base.name.replace(" ", "-")
)
def test_every_base_follows_the_usual_step_where_nothing_is_forgotten(base):
    """k is 1 then, and the two differ by rounding only."""
    model, twin = (base.model(dtype=torch.float64, hidden=8) for _ in range(2))
    config = TunerConfig(forgetting=0.0)
    ours, usual = (Mechanic(base.make(each.parameters()), config=config) for each in (model, twin))
    ours.step_in_backward()
    train(model, ours, 4)
    train(twin, usual, 4)
    assert distance(model, twin) <= 1e-9
    assert scale(ours) == pytest.approx(scale(usual), rel=1e-9)
    counted = [{key: value for key, value in o.param_groups[0].items() if key == "step"} for o in (ours, usual)]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("waiting", [1, DEFAULT], indirect=True)
def test_gradients_are_never_all_there_at_once():
    """The most that a step takes, forward and backward pass included, is less by all gradients but the largest."""

    def most(enabled):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
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


@pytest.mark.parametrize("base", ["AdamW", "SGD momentum"])
def test_a_step_does_not_wait_for_the_device(base):
    def wrap(bare):
        optimizer = Mechanic(bare)
        optimizer.step_in_backward()
        return optimizer

    assert take_steps(wrap, BY_NAME[base], "cuda") <= take_steps(lambda bare: bare, BY_NAME[base], "cuda")


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "delta"),
    [(torch.float32, torch.bfloat16), (torch.float32, "int8"), (torch.bfloat16, None), (torch.bfloat16, "int8")],
)
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


@some_wait
@pytest.mark.parametrize("delta", [torch.bfloat16, "int8"])
def test_a_stored_delta_is_rounded_as_in_the_usual_step(delta):
    codes = []
    for enabled in (False, True):
        model = mlp()
        optimizer = Mechanic(torch.optim.SGD(model.parameters(), lr=1.0), delta=delta)
        optimizer.step_in_backward(enabled)
        train(model, optimizer, 1)
        codes.append([optimizer.state[p]["mechanic_delta"] for p in model.parameters()])
    assert same_bits(*codes)


@some_wait
def test_parameters_without_a_gradient_count_and_move():
    class Unused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.sometimes = mlp(dtype=torch.float64), torch.nn.Linear(64, 10, dtype=torch.float64)

        def forward(self, images, both=True):
            return self.used(images) + self.sometimes(images) if both else self.used(images)

    torch.manual_seed(0)
    model = Unused()
    twin = copy.deepcopy(model)
    config = TunerConfig(forgetting=0.0)
    ours, usual = (Mechanic(torch.optim.AdamW(m.parameters(), lr=1.0), config=config) for m in (model, twin))
    ours.step_in_backward()
    for step in range(20):
        for each, optimizer in ((model, ours), (twin, usual)):
            images, labels = batch(step, dtype=torch.float64)
            cross_entropy(each(images, both=step % 3 == 1), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert distance(model, twin) <= 1e-9
    assert ours.state[model.sometimes.weight]["mechanic_delta"].any()


@some_wait
def test_several_tuners_and_groups_with_options_follow_the_usual_step():
    found = []
    for enabled in (False, True):
        model = mlp(dtype=torch.float64)
        groups = layer_groups(model, [{"params": list(model.parameters()), "weight_decay": 0.1, "lr": 0.5}])
        optimizer = Mechanic(torch.optim.AdamW(groups, lr=1.0), config={"forgetting": 0.0})
        optimizer.step_in_backward(enabled)
        train(model, optimizer, 20)
        found.append((model, optimizer.scales()))
    (twin, expected), (model, scales) = found
    assert distance(model, twin) <= 1e-9
    assert scales == pytest.approx(expected, rel=1e-9)
    assert len(set(scales.values())) == 2


@some_wait
def test_optimizers_together_follow_the_usual_step():
    found = []
    for enabled in (False, True):
        model = mlp(dtype=torch.float64)
        matrices, vectors = ([p for p in model.parameters() if p.ndim == dims] for dims in (2, 1))
        base = Together(BY_NAME["Muon"].make(matrices), torch.optim.AdamW(vectors, lr=1.0))
        optimizer = Mechanic(base, per_group=True, config={"forgetting": 0.0})
        optimizer.step_in_backward(enabled)
        train(model, optimizer, 10)
        found.append((model, optimizer.scales()))
    (twin, expected), (model, scales) = found
    assert distance(model, twin) <= 1e-6  # Muon computes in bfloat16
    assert scales == pytest.approx(expected, rel=1e-6)


# Checkpoints and copies.


@pytest.mark.parametrize("delta", [None, "int8"])
def test_resume_continues_bit_for_bit(delta):
    def build():
        model, optimizer = wrapped_mlp(dtype=torch.float32, delta=delta)
        return model, optimizer, CosineAnnealingLR(optimizer, 20)

    model, optimizer, schedule = build()
    train(model, optimizer, 8, scheduler=schedule)
    saved = copy.deepcopy([part.state_dict() for part in (model, optimizer, schedule)])
    train(model, optimizer, 8, first=8, scheduler=schedule)
    parts = build()
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    train(*parts[:2], 8, first=8, scheduler=parts[2])
    assert same_bits(snapshot(*parts[:2]), snapshot(model, optimizer))


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
def test_a_copy_steps_in_its_own_backward_pass(copy_of):
    model, optimizer = wrapped_mlp()
    train(model, optimizer, 5)
    twin, other = copy_of((model, optimizer))
    before = snapshot(model, optimizer)
    backward(twin, 5)
    assert all(p.grad is None for p in twin.parameters())
    other.step()
    assert same_bits(snapshot(model, optimizer), before)
    train(twin, other, 3, first=6)
    train(model, optimizer, 4, first=5)
    assert same_bits(snapshot(model, optimizer), snapshot(twin, other))


@pytest.mark.parametrize("look", [Mechanic.state_dict, copy.deepcopy, pickle.dumps, Mechanic.freeze, Mechanic.release])
def test_between_backward_and_step_nothing_is_read_and_nothing_changes(look):
    (model, optimizer), (twin, other) = wrapped_mlp(), wrapped_mlp()
    train(model, optimizer, 5)
    train(twin, other, 6)
    backward(model, 5)
    with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\).*Call step\(\) first"):
        look(optimizer)
    optimizer.step()
    assert same_bits(snapshot(model, optimizer), snapshot(twin, other))
    look(optimizer)


# What was learned.


@pytest.mark.parametrize("base", ["AdamW", "Lion", "Adafactor"])
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
def test_freezing_in_the_middle_keeps_stepping_in_the_backward_pass():
    model, optimizer = wrapped_mlp()
    train(model, optimizer, 20)
    optimizer.freeze()
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, 20)
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert not any(p.equal(b) for p, b in zip(model.parameters(), before, strict=True))


def test_after_release_gradients_stay_for_the_base():
    model, optimizer = wrapped_mlp()
    train(model, optimizer, 20)
    base = optimizer.release()
    backward(model, 20)
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
    model, extra = mlp(dtype=torch.float64), torch.nn.Parameter(torch.zeros(10, dtype=torch.float64))
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


# Gradients that are not finite, and clipping.


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


def test_each_gradient_can_be_clipped_by_a_hook_that_is_registered_before():
    found = []
    for enabled in (False, True):
        model = mlp(dtype=torch.float64)
        optimizer = Mechanic(torch.optim.SGD(model.parameters(), lr=1.0), config={"forgetting": 0.0})

        def clip(p):
            torch.nn.utils.clip_grad_norm_([p], 0.01)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(clip)
        optimizer.step_in_backward(enabled)
        train(model, optimizer, 10)
        found.append(model)
    assert distance(*found) <= 1e-9


# Trainers.


@some_wait
def test_a_trainer_with_hooks_of_its_own_takes_gradients_one_by_one():
    model, twin = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    optimizer, other = (MechanicAdamW(each.parameters()) for each in (model, twin))
    other.step_in_backward()
    for parameter in model.parameters():

        def on_gradient(tensor):
            optimizer.take_gradient(tensor)
            tensor.grad = None

        parameter.register_post_accumulate_grad_hook(on_gradient)
    train(model, optimizer, 10)
    train(twin, other, 10)
    assert same_bits(snapshot(model, optimizer), snapshot(twin, other))


def test_the_hook_of_torchs_tutorial_takes_a_gradient_as_it_is():
    model, optimizer = wrapped_mlp(enabled=False)
    twin, other = wrapped_mlp()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(optimizer.take_gradient)
    train(model, optimizer, 10)
    train(twin, other, 10)
    assert same_bits(snapshot(model, optimizer), snapshot(twin, other))


def test_a_closure_makes_the_same_step():
    model, optimizer = wrapped_mlp()
    twin, other = wrapped_mlp()

    def closure(step):
        optimizer.zero_grad()
        return backward(model, step)

    assert all(optimizer.step(functools.partial(closure, step)) > 0 for step in range(10))
    train(twin, other, 10)
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
    train(model, optimizer, 40, first=5)
    assert train(model, optimizer, 1, first=45) < 1.0


def test_a_base_that_fails_has_moved_only_parameters_that_came_before():
    model, optimizer = wrapped_mlp()
    train(model, optimizer, 5)
    before = [p.detach().clone() for p in model.parameters()]
    with failing(optimizer.base, ArithmeticError("no"), share=0.0), pytest.raises(ArithmeticError):
        backward(model, 5)
    for p, b in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_change_nothing(reentrant):
    model, optimizer = wrapped_mlp()
    twin, other = wrapped_mlp()
    for step in range(5):
        images, labels = batch(step, dtype=torch.float64)
        hidden = checkpoint(model[:2], images.requires_grad_(), use_reentrant=reentrant)
        cross_entropy(checkpoint(model[2], hidden, use_reentrant=reentrant), labels).backward()
        optimizer.step()
    train(twin, other, 5)
    assert same_bits(snapshot(model, optimizer), snapshot(twin, other))


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


@pytest.mark.parametrize("call", ["step_in_backward", "take_gradient"])
def test_steps_that_may_be_skipped_are_refused(call):
    model, optimizer = wrapped_mlp(enabled=False, skip_nonfinite=True)
    backward(model, 0)
    with pytest.raises(ValueError, match="skip_nonfinite=True needs all gradients"):
        getattr(optimizer, call)(*([model[0].weight] if call == "take_gradient" else []))
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
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) is not one that this optimizer trains"):
        optimizer.take_gradient(p)


# Over processes.


@pytest.mark.long
def test_sharded_parameters_follow_one_process_and_ddp_is_refused(tmp_path):
    found = run(2, tmp_path / "ranks", parallel_backward.JOBS)
    assert_followed({case: report for case, report in found.items() if "parameters" in report})
    for (name, *_), report in found.items():
        if name == "fsdp2":
            assert report["gradients left"] == 0
            assert report["collectives of a step"] == 1
        if name in ("ddp", "fsdp1"):
            assert "DataParallel reduce gradients after the hooks" in report["refused"]
        if name == "one_bad_rank":
            assert all(report.values()), report
        if name == "resume":
            assert report == {"bitwise": True}


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
