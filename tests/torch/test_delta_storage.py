"""``Mechanic(base, delta=...)``: what is kept, what a step does, and what bfloat16 parameters make of it."""

import copy
import io
import sys

import pytest
import schedulefree
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, AdamW

from mechanic.torch import Mechanic, Together, buckets, step
from mechanic.torch.buckets import decoded
from tests.torch.bases import BY_NAME
from tests.torch.paths import by_default, instead_of_its_step, on_copies
from tests.torch.task import backward, mlp, same_bits, scale, snapshot, train, train_loss, values_of

BFLOAT16 = torch.bfloat16
rounded = pytest.mark.parametrize("delta", [BFLOAT16, "int8"], ids=["bfloat16", "int8"])
GAP = {None: 0.0, BFLOAT16: 2**-7, "int8": 2 / 127}  # at most, relative to the largest element of a block
DTYPES = {None: torch.float32, BFLOAT16: BFLOAT16, "int8": torch.int8}


def delta_of(optimizer, p):
    """Decoded, in float64."""
    return decoded(optimizer.state[p])["mechanic_delta"].double()


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def trained(
    delta="int8", wrap=by_default, base=AdamW, steps=10, dtype=torch.float32, model=None, config=None, **of_base
):
    model = mlp(dtype=dtype) if model is None else model
    optimizer = wrap(base(model.parameters(), lr=1.0, **of_base), delta=delta, config=config)
    train(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("delta", ["bfloat16", torch.float16, torch.int8, torch.float64, 8, "int4", [torch.float32]])
def test_other_storages_are_refused(delta):
    with pytest.raises(ValueError, match=r"delta must be .* or 'int8', got"):
        Mechanic(SGD(mlp().parameters(), lr=1.0), delta=delta)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_the_default_is_the_dtype_of_the_parameters_bit_for_bit(dtype):
    default, named = trained(None, dtype=dtype), trained(dtype, dtype=dtype)
    assert same_bits(snapshot(*default), snapshot(*named))


@rounded
def test_codes_are_kept_and_a_checkpoint_has_plain_tensors_of_the_parameters_shape(delta):
    model, optimizer = trained(delta)
    state_dict = saved(optimizer)
    for key, p in enumerate(model.parameters()):
        state, entry = optimizer.state[p], state_dict["state"][key]
        assert (state["mechanic_delta"].dtype, state["mechanic_delta"].shape) == (DTYPES[delta], p.shape)
        assert state["mechanic_delta"].any()
        assert ("mechanic_delta_scales" in state) == (delta == "int8")
        if delta == "int8":
            assert state["mechanic_delta_scales"].shape == (-(-p.numel() // 256),)
        assert entry["mechanic_delta"].shape == p.shape
        assert entry["mechanic_delta"].dtype == (torch.float32 if delta == "int8" else delta)
        assert "mechanic_delta_scales" not in entry
        assert entry["mechanic_delta"].double().equal(delta_of(optimizer, p))


@pytest.mark.long
@pytest.mark.parametrize(
    ("base", "wrap", "delta"),
    [(AdamW, by_default, BFLOAT16), (AdamW, on_copies, "int8"), (SGD, by_default, "int8")],
)
def test_training_comes_as_far(delta, wrap, base):
    losses = {}
    for chosen in (None, delta):
        model, optimizer = trained(chosen, wrap, base, steps=0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        losses[chosen] = train(model, optimizer, 200, scheduler=schedule)
    assert losses[delta] <= 1.3 * losses[None]


# One step.


@pytest.mark.parametrize("wrap", [by_default, on_copies])
@rounded
def test_parameters_move_by_the_delta_that_is_not_yet_rounded_which_is_within_a_gap(wrap, delta):
    model, optimizer = trained(delta, wrap, SGD, dtype=torch.float64, config={"forgetting": 0.0})
    params = list(model.parameters())
    s, deltas, values = scale(optimizer), [delta_of(optimizer, p) for p in params], values_of(model)
    optimizer.zero_grad()
    backward(model, 10)
    updates = [-p.grad for p in params]
    params[1].grad = None
    updates[1] = torch.zeros_like(updates[1])
    optimizer.step()
    new_s = scale(optimizer)
    assert s != new_s
    for p, d, x, u in zip(params, deltas, values, updates, strict=True):
        new_d = delta_of(optimizer, p)
        torch.testing.assert_close(p.detach(), x + new_s * (d + u) - s * d, rtol=0, atol=1e-12)
        assert (new_d - d - u).abs().max() <= GAP[delta] * (d + u).abs().max()
        assert not u.any() or not new_d.equal(d + u)


@pytest.mark.long
@rounded
def test_x_minus_s_delta_stays_where_it_was_in_the_mean(delta):
    """Every step moves it by S times what rounding has added, which has mean 0 and does not grow."""
    model = mlp(hidden=256, dtype=torch.float64)
    start = values_of(model)
    _, optimizer = trained(delta, model=model, steps=60, weight_decay=0.0)
    moved, gaps = [], []
    for p, x in zip(model.parameters(), start, strict=True):
        d = delta_of(optimizer, p)
        moved.append((p.detach() - scale(optimizer) * d - x).flatten())
        gaps.append((scale(optimizer) * GAP[delta] * d.abs().max()).expand(p.numel()))
    moved, gaps = torch.cat(moved), torch.cat(gaps)
    assert moved.abs().max() > 0
    assert moved.mean().abs() <= 4 * moved.std() / len(moved) ** 0.5
    assert (moved.abs() <= 60**0.5 * 4 * gaps).all()


def together(dtype=torch.float32):
    model = mlp(dtype=dtype)
    parts = SGD(model[0].parameters(), lr=1.0, momentum=0.9), AdamW(model[2].parameters(), lr=1.0)
    optimizer = Mechanic(Together(*parts), per_group=True, delta="int8")
    train(model, optimizer, 10)
    return model, optimizer


@pytest.mark.parametrize(
    "run",
    [lambda: trained(BFLOAT16), trained, lambda: trained(dtype=BFLOAT16), together],
    ids=["bfloat16", "int8", "bfloat16 parameters", "together"],
)
def test_parts_do_not_change_the_step(run, monkeypatch):
    whole, counts = snapshot(*run()), set()
    parts_of = buckets.parts_of
    monkeypatch.setattr(
        step, "parts_of", lambda *args, **one: counts.add(len(found := parts_of(*args, **one))) or found
    )
    for size in (1, 100, sum(p.numel() for p in mlp().parameters()) - 1):
        monkeypatch.setitem(buckets.PART, "cpu", size)
        assert same_bits(whole, snapshot(*run()))
    assert counts >= {2, 4}


def test_a_base_that_fails_in_a_later_part_leaves_every_parameter_before_or_after_its_step(monkeypatch):
    monkeypatch.setitem(buckets.PART, "cpu", 100)
    (model, optimizer), (twin_model, twin) = (trained(base=SGD, dtype=torch.float64) for _ in range(2))
    before = snapshot(model, optimizer)[:4]
    backward(twin_model, 10)
    twin.step()
    backward(model, 10)
    calls, init_group = [], SGD._init_group

    def fail_in_the_third_part(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError
        return init_group(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(SGD, "_init_group", fail_in_the_third_part)
        with pytest.raises(MemoryError) as caught:
            optimizer.step()
    notes = getattr(caught.value, "__notes__", [""])
    assert sys.version_info < (3, 11) or "some parameters have made their step" in notes[-1]
    assert scale(optimizer) == scale(twin)
    after, now = snapshot(twin_model, twin)[:4], snapshot(model, optimizer)[:4]
    assert {torch.equal(x, a) for x, a in zip(now, after, strict=True)} == {True, False}
    assert all(torch.equal(x, b) or torch.equal(x, a) for x, b, a in zip(now, before, after, strict=True))
    train(model, optimizer, 3, first=11)


@pytest.mark.parametrize("delta", DTYPES)
def test_every_kind_of_parameter(delta):
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (0, 3), (1,), (5, 257), (2, 3, 4, 5)]
    params = [torch.randn(shape, generator=generator) for shape in shapes]
    params.append(params[4].to(memory_format=torch.channels_last))
    params.append(torch.randn(7, 5, generator=generator).t())
    params.append(torch.randn(6, 8, generator=generator)[:, ::2])  # with gaps
    params.append(torch.randn(40, generator=generator).double())
    params.append(torch.randn(9, generator=generator, dtype=torch.complex64))
    params.append(torch.randn(30, generator=generator).bfloat16())
    params = [torch.nn.Parameter(p) for p in params]
    start = [p.detach().clone() for p in params]
    optimizer = Mechanic(AdamW(params, lr=1.0, weight_decay=0.1, foreach=False), delta=delta)
    for _ in range(30):
        for p in params:
            p.grad = p.detach() - 0.5
        optimizer.step()
    for p, x in zip(params, start, strict=True):
        assert p.isfinite().all()
        assert not p.numel() or (p - 0.5).abs().sum() < (x - 0.5).abs().sum()
        kept = p.dtype if delta is None or p.is_complex() else DTYPES[delta]
        assert optimizer.state[p]["mechanic_delta"].dtype == kept
    twin = [torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params]
    resumed = Mechanic(AdamW(twin, lr=1.0, weight_decay=0.1, foreach=False), delta=delta)
    resumed.load_state_dict(saved(optimizer))
    for p, q in zip(params, twin, strict=True):
        for key, entry in optimizer.state[p].items():
            assert resumed.state[q][key].equal(entry)


@pytest.mark.parametrize("default", [BFLOAT16, torch.float64], ids=str)
def test_the_default_dtype_does_not_matter(default):
    def trained():
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30, dtype=torch.float32)
        optimizer = Mechanic(SGD(model.parameters(), lr=1.0, momentum=0.9), delta="int8")
        for index in range(5):
            for p in model.parameters():
                p.grad = torch.cos(3 * p.detach() + index)
            optimizer.step()
        return snapshot(model, optimizer)

    expected = trained()
    torch.set_default_dtype(default)
    try:
        assert same_bits(trained(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.long
def test_fake_tensors_can_be_stepped_with():
    with FakeTensorMode():
        model = torch.nn.Linear(4, 1)
        optimizer = Mechanic(AdamW(model.parameters(), lr=1.0), delta="int8")
        for _ in range(2):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert optimizer.state[model.weight]["mechanic_delta"].itemsize == 1


# What may happen to an optimizer.


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [(None, "int8"), ("int8", None), ("int8", BFLOAT16), (BFLOAT16, "int8"), ("int8", "int8")],
)
def test_a_checkpoint_loads_into_every_storage(before, after):
    model, optimizer = trained(before)
    twin = copy.deepcopy(model)
    other = Mechanic(AdamW(twin.parameters(), lr=1.0), delta=after)
    other.load_state_dict(saved(optimizer))
    assert other.scales() == optimizer.scales()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        delta, found = delta_of(optimizer, p), delta_of(other, q)
        assert (found - delta).abs().max() <= 0.5 * GAP[after] * delta.abs().max()
        assert other.state[q]["mechanic_delta"].dtype == DTYPES[after]
        assert ("mechanic_delta_scales" in other.state[q]) == (after == "int8")
    assert train(twin, other, 60, first=10) < 1


@pytest.mark.parametrize("into", [None, "int8"])
def test_the_state_dict_of_the_base_itself_is_refused(into):
    """It has codes, which mean nothing without their scales."""
    _, optimizer = trained()
    model, other = trained(into)
    before = snapshot(model, other)
    with pytest.raises(ValueError, match=r"state\[0\]\['mechanic_delta'\]: the checkpoint has codes"):
        other.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    assert same_bits(before, snapshot(model, other))


def test_a_resized_parameter_is_refused():
    model, optimizer = trained()
    model[0].weight.data = torch.zeros(40, 64)
    model[0].weight.grad = torch.zeros(40, 64)
    with pytest.raises(ValueError, match=r"shape \(40, 64\) now, .* int8 codes cannot be"):
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 10])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_a_step_at_lr_0_moves_no_bit(dtype, steps):
    model, optimizer = trained(dtype=dtype, steps=steps, weight_decay=0.1)
    before = values_of(model)
    optimizer.param_groups[0]["lr"] = 0.0
    backward(model, 10)
    optimizer.step()
    assert same_bits(before, values_of(model))
    assert dtypes_of(optimizer) == {dtype}


def test_a_group_that_is_added_gets_a_delta_of_the_same_kind():
    model = mlp()
    optimizer = Mechanic(AdamW(model[0].parameters(), lr=1.0), delta="int8")
    train(model, optimizer, 5)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    train(model, optimizer, 5, first=5)
    assert {optimizer.state[p]["mechanic_delta"].dtype for p in model.parameters()} == {torch.int8}


@pytest.mark.long
def test_own_iterates():
    losses = {}
    for delta in (None, "int8"):
        model = mlp()
        optimizer = Mechanic(schedulefree.AdamWScheduleFree(model.parameters(), lr=1.0), delta=delta)
        optimizer.train()
        train(model, optimizer, 150)
        before = values_of(model)
        optimizer.eval()
        losses[delta] = train_loss(model)
        optimizer.train()
        for p, x in zip(model.parameters(), before, strict=True):
            assert (p - x).abs().max() <= 0.02 * x.abs().max()
    assert losses["int8"] <= 1.3 * losses[None]


@pytest.mark.long
@pytest.mark.parametrize("name", ["Lion", "SOAP", "AdamW tensor lr"])
def test_bases_that_look_at_values(name):
    base = BY_NAME[name]
    model = base.model()
    assert train(model, Mechanic(base.make(model.parameters()), delta="int8"), 60) < 1


# bfloat16 parameters with it: the base sees them as they are, and its state stays as it makes it.

MOMENTS = "exp_avg", "exp_avg_sq", "momentum_buffer"


def half(*arguments, **options):
    return trained(*arguments, dtype=BFLOAT16, **options)


def dtypes_of(optimizer, keys=MOMENTS):
    return {state[key].dtype for state in optimizer.state.values() for key in keys if key in state}


def value_of(p, optimizer):
    return p.detach().double() + optimizer.state[p]["mechanic_residual"].double()


def test_the_moments_are_the_bases_own_and_its_gradients_no_copies():
    model, optimizer = half()
    assert dtypes_of(optimizer) == dtypes_of(together(BFLOAT16)[1]) == {BFLOAT16}
    seen = []

    def look(step, shown):
        p = shown.param_groups[0]["params"][0]
        seen.append((p.dtype, p.grad, bool(p.any())))
        step()

    optimizer.zero_grad()
    backward(model, 10)
    grad = model[0].weight.grad
    with instead_of_its_step(optimizer.base, look):
        optimizer.step()
    ((dtype, seen_grad, any_value),) = seen
    assert dtype == BFLOAT16
    assert seen_grad is grad is model[0].weight.grad
    assert not any_value


def test_the_update_is_that_of_the_bare_base_to_the_bit():
    """But for weight decay, which Mechanic adds to it in float32."""
    model, bare_model = mlp(dtype=BFLOAT16), mlp(dtype=BFLOAT16)
    optimizer = Mechanic(AdamW(model.parameters(), lr=1.0, weight_decay=0.0), delta="int8", config={"forgetting": 0.0})
    bare = AdamW(bare_model.parameters(), lr=1.0, weight_decay=0.0)
    for number in range(5):
        optimizer.zero_grad()
        backward(model, number)
        for p, q in zip(model.parameters(), bare_model.parameters(), strict=True):
            q.data.zero_()
            q.grad = p.grad.clone()
        optimizer.step()
        bare.step()
    for p, q in zip(model.parameters(), bare_model.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[p][key].equal(bare.state[q][key])


@rounded
def test_x_stays_at_the_start_plus_s_delta(delta):
    """Within the rounding of Delta, of which 30 steps add up."""
    model = mlp(dtype=BFLOAT16)
    start = [p.detach().double() for p in model.parameters()]
    _, optimizer = trained(delta, steps=30, model=model, weight_decay=0.3)
    for p, x_1 in zip(model.parameters(), start, strict=True):
        moved = scale(optimizer) * delta_of(optimizer, p)
        assert (value_of(p, optimizer) - x_1 - moved).norm() <= 0.1 * moved.norm()


@pytest.mark.parametrize("name", ["Adagrad", "Adamax", "NAdam", "Rprop"])
def test_bases_that_lose_too_much_in_bfloat16_keep_float32(name):
    _, optimizer = half(base=getattr(torch.optim, name), steps=5)
    tensors = [value for state in optimizer.state.values() for key, value in state.items() if "mechanic" not in key]
    assert {value.dtype for value in tensors if value.ndim} == {torch.float32}


def test_moments_are_float32_in_float16_and_where_the_base_must_see_the_values():
    """An eps of 1e-8 is zero in float16."""
    assert dtypes_of(trained(dtype=torch.float16, steps=5)[1]) == {torch.float32}
    assert dtypes_of(half(base=SGD, steps=5, momentum=0.9, weight_decay=1e-3)[1]) == {torch.float32}


@pytest.mark.long
def test_moments_are_cast_where_weight_decay_that_needs_the_values_comes_and_goes():
    model, optimizer = half(steps=5, base=torch.optim.Adam)
    optimizer.param_groups[0]["weight_decay"] = 1e-3
    train(model, optimizer, 5, first=5)
    assert dtypes_of(optimizer) == {torch.float32}
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert train(model, optimizer, 40, first=10) < 1
    assert dtypes_of(optimizer) == {BFLOAT16}


def test_a_checkpoint_goes_from_float32_moments_to_bfloat16_ones_and_back():
    model, optimizer = half(torch.float32)
    other = Mechanic(AdamW(model.parameters(), lr=1.0), delta="int8")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert dtypes_of(optimizer) == {torch.float32}
    assert dtypes_of(other) == {BFLOAT16}
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert dtypes_of(optimizer) == {torch.float32}
    assert train(model, optimizer, 40, first=10) < 1


@pytest.mark.long
def test_a_frozen_scale_steps_as_the_tuned_one_did_and_is_released():
    model, optimizer = half(steps=60, weight_decay=0.1)
    twin = copy.deepcopy(model)
    wide = Mechanic(AdamW(twin.parameters(), lr=1.0, weight_decay=0.1), delta=torch.float32)
    wide.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    start = [value_of(p, optimizer) for p in model.parameters()]
    learned = optimizer.learned_rates()
    for each in ((model, optimizer), (twin, wide)):
        each[1].freeze()
        train(*each, 1, first=60)
    assert optimizer.scales() == pytest.approx(learned)
    assert not any("mechanic_delta" in key for state in optimizer.state.values() for key in state)
    assert dtypes_of(optimizer) == {BFLOAT16}
    for x, p, q in zip(start, model.parameters(), twin.parameters(), strict=True):
        moved, expected = value_of(p, optimizer) - x, value_of(q, wide) - x
        assert (moved - expected).norm() <= 0.01 * expected.norm()
    base = optimizer.release()
    assert not any(key.startswith("mechanic_") for state in base.state.values() for key in state)
    assert train(model, base, 20, first=61) < 1


class Widen(torch.nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.long
def test_dtypes_side_by_side():
    model = mlp(dtype=BFLOAT16)
    model[2].float()
    model[1] = torch.nn.Sequential(torch.nn.ReLU(), Widen())
    _, optimizer = trained(model=model, steps=60)
    assert train_loss(model) < 1
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == BFLOAT16
    assert optimizer.state[model[2].weight]["exp_avg"].dtype == torch.float32
    optimizer.freeze()
    assert train(model, optimizer, 5, first=60) < 1
