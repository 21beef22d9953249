"""What must hold around every base optimizer. What does not depend on the base is tested with every start of a step."""

import copy
import pickle
import statistics
import sys

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mechanic.torch import Mechanic
from tests.torch.bases import BASES, BY_NAME, Base, every_base
from tests.torch.paths import assert_updated_by, deltas_of, every_start, every_start_and_int8, failing
from tests.torch.task import backward, same_bits, scale, snapshot, train, train_loss, values_of

SCHEDULERS = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda t: min(1, (t + 1) / 5)),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, 7)], [3]
    ),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.01, total_steps=10, cycle_momentum=False),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1, threshold=10.0),
}


@pytest.mark.long
@every_base
def test_trains(base: Base):
    losses = []
    for first in (0, 100, 200):  # batches: so early S still swings, and one run tells little
        model = base.model()
        optimizer = base.wrap(model)
        start = train_loss(model)
        train(model, optimizer, 3, first=first)
        assert scale(optimizer) > 0
        losses.append(train(model, optimizer, 57, first=first + 3))
    assert statistics.mean(losses) < start / 2


@pytest.mark.parametrize(
    ("name", "base"),
    [
        *(pytest.param("LambdaLR", base, id=f"LambdaLR-{base.name}") for base in BASES),
        *(
            pytest.param(name, BY_NAME[base], id=f"{name}-{base}")
            for name in SCHEDULERS
            if name != "LambdaLR"
            for base in ("AdamW", "AdamW tensor lr")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR's own doing, up to torch 2.6
def test_a_scheduler_sets_the_rate_that_the_base_steps_with(base: Base, name):
    """The base's update is that of a bare one at the same point, whose learning rate is divided by the peak."""
    model, bare_model = base.model(dtype=torch.float64), base.model(dtype=torch.float64)
    optimizer, bare = base.wrap(model), base.make(bare_model.parameters())
    schedule, bare_schedule = SCHEDULERS[name](optimizer), SCHEDULERS[name](bare)
    peak_lr = 0.01 if name == "OneCycleLR" else 1.0  # the peak of the schedule
    rates = set()
    for step in range(9):
        lr = bare.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["lr"] == lr
        rates.add(float(lr))
        optimizer.zero_grad()
        backward(model, step)
        bare_model.load_state_dict(model.state_dict())
        for p, q in zip(model.parameters(), bare_model.parameters(), strict=True):
            q.grad = p.grad.clone()
        start, before = values_of(model), deltas_of(model, optimizer)
        bare.param_groups[0]["lr"] = lr / peak_lr
        bare.step()
        bare.param_groups[0]["lr"] = lr
        optimizer.step()
        updates = [q - x for q, x in zip(values_of(bare_model), start, strict=True)]
        assert_updated_by(updates, before=before, after=deltas_of(model, optimizer))
        for sched in (schedule, bare_schedule):
            sched.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(rates) > 1
    assert all(p.isfinite().all() for p in model.parameters())


@every_start
def test_a_scheduler_attached_before_wrapping_does_not_change_the_unit(base: Base, wrap):
    model = base.model()
    inner = base.make(model.parameters())
    schedule = lr_scheduler.LambdaLR(inner, lambda t: t / 10)  # starts at lr = 0
    optimizer = wrap(inner)
    train(model, optimizer, 12, scheduler=schedule)
    assert optimizer.param_groups[0]["mechanic_unit"] == 1.0
    assert scale(optimizer) > 0


@every_start_and_int8
def test_grad_scaler_skips_a_step_with_inf_without_a_trace(base: Base, wrap):
    def run(poisoned: bool):
        model = base.model()
        optimizer = wrap(base.make(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000, backoff_factor=0.9999999)
        for step in range(8):
            if poisoned and step == 4:
                backward(model, 99)
                next(model.parameters()).grad[0, 0] = float("inf")
                before = snapshot(model, optimizer)
                scaler.step(optimizer)
                scaler.update(8.0)
                assert same_bits(before, snapshot(model, optimizer))
            optimizer.zero_grad()
            backward(model, step)
            for p in model.parameters():
                p.grad.mul_(scaler.get_scale())
            scaler.scale(torch.zeros(()))  # the scaler wants to have been used
            scaler.step(optimizer)
            scaler.update()
        return snapshot(model, optimizer)

    assert same_bits(run(poisoned=True), run(poisoned=False))


@every_start
def test_accumulated_and_clipped_gradients(base: Base, wrap):
    model = base.model()
    optimizer = wrap(base.make(model.parameters()))
    start = train_loss(model)
    for step in range(40):
        optimizer.zero_grad()
        backward(model, 2 * step)
        backward(model, 2 * step + 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert train_loss(model) < start / 1.5


@every_start_and_int8
def test_closure_gives_the_same_bits_and_its_loss(base: Base, wrap):
    models = base.model(), base.model()
    optimizers = [wrap(base.make(model.parameters())) for model in models]
    for step in range(5):
        optimizers[0].zero_grad()
        loss = backward(models[0], step)
        optimizers[0].step()

        def closure(step=step):
            assert torch.is_grad_enabled()
            optimizers[1].zero_grad()
            return backward(models[1], step)

        assert optimizers[1].step(closure) == loss
    assert same_bits(*(snapshot(m, o) for m, o in zip(models, optimizers, strict=True)))


def trained_with_signed_gradients(model, optimizer, sign):
    for step in range(8):
        optimizer.zero_grad()
        backward(model, step)
        for p in model.parameters():
            p.grad.mul_(sign)
        optimizer.step()
    return values_of(model)


@every_base
def test_maximize_mirrors_minimize_where_the_bare_base_does(base: Base):
    if not base.has_maximize:
        pytest.skip(f"{base.name} cannot ascend")
    results = []
    for finish in (lambda bare: bare, Mechanic):
        down, up = base.model(), base.model()
        minimized = trained_with_signed_gradients(down, finish(base.make(down.parameters())), 1)
        maximized = trained_with_signed_gradients(up, finish(base.make(up.parameters(), maximize=True)), -1)
        results.append(same_bits(minimized, maximized))
    bare, ours = results
    assert bare == ours
    assert bare or base.name == "Adan"  # which flips only part of what it keeps


def recorded_calls(model, optimizer, *registrations):
    """Which hooks two steps called, and with what kind of optimizer. A registration is a name and a function."""
    calls = []

    def hook(name):
        return lambda opt, *_: calls.append((name, type(opt)))

    handles = [register(hook(name)) for name, register in registrations]
    try:
        train(model, optimizer, 2)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@every_start_and_int8
def test_every_hook_fires_once_per_step(base: Base, wrap):
    """Also those on the base itself."""
    model = base.model()
    optimizer = wrap(base.make(model.parameters()))
    inner = type(optimizer.base)
    calls = recorded_calls(
        model,
        optimizer,
        ("global pre", register_optimizer_step_pre_hook),
        ("global post", register_optimizer_step_post_hook),
        ("pre", optimizer.register_step_pre_hook),
        ("post", optimizer.register_step_post_hook),
        ("base pre", optimizer.base.register_step_pre_hook),
        ("base post", optimizer.base.register_step_post_hook),
    )
    once = [("global pre", Mechanic), ("pre", Mechanic), ("base pre", inner)]
    once += [("base post", inner), ("post", Mechanic), ("global post", Mechanic)]
    assert calls == once * 2


def takes_a_late_group(base):
    model = base.model()
    bare = base.make(list(model[0].parameters()))
    bare.add_param_group({"params": list(model[2].parameters())})
    train(model, bare, 1)


@every_base
def test_a_group_added_in_mid_training_joins_the_tuner(base: Base):
    model = base.model()
    first, second = model[0].parameters(), model[2].parameters()
    try:
        takes_a_late_group(base)
    except KeyError as error:
        pytest.skip(f"a bare {base.name} of this torch does not take a late group: KeyError {error}")
    optimizer = Mechanic(base.make(list(first)))
    train(model, optimizer, 5)
    learned, untouched = scale(optimizer), values_of(model[2])
    optimizer.add_param_group({"params": list(second)})
    assert optimizer.param_groups[1]["mechanic_tuner"].equal(optimizer.param_groups[0]["mechanic_tuner"])
    assert learned > 0
    train(model, optimizer, 5, first=5)
    assert not same_bits(untouched, values_of(model[2]))
    assert optimizer.param_groups[1]["mechanic_tuner"].equal(optimizer.param_groups[0]["mechanic_tuner"])


@every_base
def test_parameters_without_gradient_now_and_then_or_always(base: Base):
    model = base.model()
    never = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = Mechanic(base.make([*model.parameters(), never]))
    for step in range(10):
        optimizer.zero_grad()
        backward(model, step)
        if step % 3 == 1:
            model[0].weight.grad = None
            old_scale, old = scale(optimizer), model[0].weight.detach().clone()
            delta = optimizer.state[model[0].weight]["mechanic_delta"].clone()
            optimizer.step()
            moved_by = scale(optimizer) * optimizer.state[model[0].weight]["mechanic_delta"] - old_scale * delta
            torch.testing.assert_close(model[0].weight.detach(), old + moved_by, rtol=0, atol=1e-6)
        else:
            optimizer.step()
    assert never.equal(torch.ones(3, 3))
    assert never not in optimizer.state or base.cls is torch.optim.Adagrad  # which has state before its first step
    assert scale(optimizer) > 0


@every_start
def test_frozen_layers_stay_where_they_are_and_thaw_from_there(base: Base, wrap):
    model = base.model(dtype=torch.float64)
    optimizer = wrap(base.make(model.parameters()))
    train(model, optimizer, 5)
    frozen, delta = values_of(model[0]), optimizer.state[model[0].weight]["mechanic_delta"].clone()
    model[0].requires_grad_(False)  # with its last gradient still in place
    for step in range(5, 25):
        optimizer.step()
        for p in model[2].parameters():
            p.grad = None
        backward(model, step)
    assert same_bits(frozen, values_of(model[0]))
    assert optimizer.state[model[0].weight]["mechanic_delta"].equal(delta)
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    backward(model, 25)
    scale_before = scale(optimizer)
    optimizer.step()
    new_delta = optimizer.state[model[0].weight]["mechanic_delta"]
    # x' - x = (S' - S) Delta + S' u: it does not catch up on what it missed.
    moved = scale(optimizer) * new_delta - scale_before * delta
    torch.testing.assert_close(model[0].weight.detach() - frozen[0], moved, rtol=1e-9, atol=1e-12)
    assert moved.any()


@every_start_and_int8
def test_frozen_layers_do_not_count(base: Base, wrap):
    models = base.model(), base.model()
    models[0][0].requires_grad_(False)
    whole, part = wrap(base.make(models[0].parameters())), wrap(base.make(list(models[1][2].parameters())))
    for model, optimizer in zip(models, (whole, part), strict=True):
        train(model, optimizer, 6)
    assert scale(whole) == scale(part) > 0
    assert same_bits(values_of(models[0]), values_of(models[1]))


@every_start_and_int8
def test_a_step_without_any_gradient_changes_nothing(base: Base, wrap):
    model = base.model()
    optimizer = wrap(base.make(model.parameters()))
    optimizer.step()
    assert scale(optimizer) == 0
    train(model, optimizer, 5)
    optimizer.zero_grad()
    before = values_of(model), optimizer.param_groups[0]["mechanic_tuner"].clone()
    optimizer.step()
    assert same_bits(before[0], values_of(model))
    assert before[1].equal(optimizer.param_groups[0]["mechanic_tuner"])


@every_base
def test_a_zero_gradient_zero_lr_step_changes_nothing(base: Base):
    """torch.distributed.checkpoint makes such a step to fill the state of an optimizer it will load into."""
    model = base.model()
    optimizer = base.wrap(model)
    train(model, optimizer, 5)
    before = values_of(model), optimizer.param_groups[0]["mechanic_tuner"].clone()
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if torch.is_tensor(group["lr"]) else 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert before[1].equal(optimizer.param_groups[0]["mechanic_tuner"])
    if base.steps_by_an_earlier_lr:
        pytest.skip(f"a bare {base.name} moves on such a step as well")
    assert same_bits(before[0], values_of(model))


@every_start
def test_a_write_to_the_parameters_between_steps_survives(base: Base, wrap):
    """Twins on the same gradients, one of them moved by 1 in between: it stays moved by 1."""
    models = base.model(dtype=torch.float64), base.model(dtype=torch.float64)
    optimizers = [wrap(base.make(model.parameters()), config={"decay": 0.0}) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 10)
    with torch.no_grad():
        for p in models[1].parameters():
            p.add_(1.0)
    optimizers[0].zero_grad()
    backward(models[0], 10)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        q.grad = p.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    new_scale = scale(optimizers[0])
    assert scale(optimizers[1]) == new_scale
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        # Weight decay and trust ratios see the write, as they would bare; that is in u, and so in Delta'.
        sees = optimizers[1].state[q]["mechanic_delta"] - optimizers[0].state[p]["mechanic_delta"]
        torch.testing.assert_close(q - p, 1 + new_scale * sees, rtol=0, atol=1e-12)


@every_base
def test_a_copy_goes_on_with_the_same_bits(base: Base):
    if base.loses_attributes_when_copied:
        pytest.skip(f"a bare {base.name} cannot step after it was copied either")
    model = base.model()
    optimizer = base.wrap(model)
    train(model, optimizer, 5)
    pair = model, optimizer
    twins = copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))
    train(model, optimizer, 5, first=5)
    for twin_model, twin in twins:
        assert twin_model[0].weight is twin.param_groups[0]["params"][0]
        train(twin_model, twin, 5, first=5)
        assert same_bits(snapshot(model, optimizer), snapshot(twin_model, twin))


def growing_step(base, wrap=Mechanic):
    """The first step after the third on which S is larger than ever, so that a part of Delta is let go."""
    model = base.model(dtype=torch.float64)
    optimizer = wrap(base.make(model.parameters()))
    train(model, optimizer, 3)
    largest = scale(optimizer)
    for step in range(3, 40):
        train(model, optimizer, 1, first=step)
        if scale(optimizer) > 1.01 * largest:
            return step
        largest = max(largest, scale(optimizer))
    raise AssertionError("S never grew")


@every_start_and_int8
def test_a_base_that_raises_at_once_halfway_or_at_the_end_leaves_no_trace(base: Base, wrap):
    last = growing_step(base, wrap)
    models = model, twin_model = base.model(dtype=torch.float64), base.model(dtype=torch.float64)
    optimizer, twin = (wrap(base.make(m.parameters())) for m in models)
    train(model, optimizer, last)
    train(twin_model, twin, last)
    optimizer.zero_grad()
    backward(model, last)

    def everything():
        options = [{key: v for key, v in group.items() if key != "params"} for group in optimizer.param_groups]
        tuner = optimizer.param_groups[0]["mechanic_tuner"].clone()
        return options, [*values_of(model), *deltas_of(model, optimizer), tuner]

    before, tensors = everything()
    failures = [(KeyboardInterrupt, 0.0, False), *((RuntimeError, share, True) for share in (0.0, 0.5, 1.0))]
    for error, share, grad_mode in failures:
        with torch.set_grad_enabled(grad_mode), failing(optimizer.base, error("out of memory"), share=share):
            with pytest.raises(error, match="out of memory") as caught:
                optimizer.step()
            assert torch.is_grad_enabled() is grad_mode
        notes = getattr(caught.value, "__notes__", [""])
        is_noted = sys.version_info >= (3, 11) and error is RuntimeError
        assert not is_noted or "no parameter has moved" in notes[-1]
        options, now = everything()
        assert all(a[key] is b[key] for a, b in zip(options, before, strict=True) for key in a.keys() | b.keys())
        assert same_bits(now, tensors)
        if share == 0:  # else the base's own state may be another
            assert same_bits(snapshot(model, optimizer), snapshot(twin_model, twin))
    train(model, optimizer, 1, first=last)
    assert not same_bits(values_of(model), values_of(twin_model))


@every_start_and_int8
def test_a_first_step_that_fails_leaves_a_checkpoint_that_loads(base: Base, wrap):
    for share in (0.0, 0.5, 1.0):
        model = base.model()
        optimizer = wrap(base.make(model.parameters()))
        before = values_of(model)
        backward(model, 0)
        with failing(optimizer.base, KeyboardInterrupt(), share=share), pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert same_bits(before, values_of(model))  # S is still 0
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, 3)
        assert scale(optimizer) > 0
