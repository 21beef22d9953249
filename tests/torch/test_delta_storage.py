"""``Mechanic(base, delta=...)``: what is kept, what a step does, and that it goes on from anywhere."""

import copy
import io
import pickle
import sys

import pytest
import schedulefree
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, AdamW

from mechanic.torch import Mechanic, Together, buckets, mechanic_class, step
from mechanic.torch.buckets import decoded
from tests.torch.bases import BY_NAME
from tests.torch.memory import allocations
from tests.torch.paths import both_paths, by_default, failing, on_copies
from tests.torch.task import backward, mlp, same_bits, scale, snapshot, train, train_loss

STORAGES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": "int8"}
every_storage = pytest.mark.parametrize("delta", STORAGES.values(), ids=STORAGES)
rounded = pytest.mark.parametrize("delta", [torch.bfloat16, "int8"], ids=["bfloat16", "int8"])
GAP = {torch.bfloat16: 2**-7, "int8": 2 / 127}  # at most, relative to the largest element of a block


def delta_of(optimizer, p):
    """Decoded, in float64."""
    return decoded(optimizer.state[p])["mechanic_delta"].double()


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def trained(delta=None, wrap=by_default, base=AdamW, steps=10, dtype=torch.float32, **options):
    model = mlp(dtype=dtype)
    optimizer = wrap(base(model.parameters(), lr=1.0), delta=delta, **options)
    train(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("delta", ["bfloat16", torch.float16, torch.int8, torch.float64, 8, "int4", [torch.float32]])
def test_other_storages_are_refused(delta):
    with pytest.raises(ValueError, match=r"delta must be .* or 'int8', got"):
        Mechanic(SGD(mlp().parameters(), lr=1.0), delta=delta)


def test_classes_take_it_as_well():
    model = mlp()
    optimizer = mechanic_class(torch.optim.RAdam)(model.parameters(), lr=1.0, delta="int8")
    train(model, optimizer, 2)
    assert optimizer.state[model[0].weight]["mechanic_delta"].dtype == torch.int8


@both_paths
def test_float32_is_the_default_bit_for_bit(wrap):
    assert same_bits(snapshot(*trained(wrap=wrap)), snapshot(*trained(torch.float32, wrap)))


@both_paths
@rounded
def test_what_is_kept(wrap, delta):
    model, optimizer = trained(delta, wrap)
    for p in model.parameters():
        state = optimizer.state[p]
        codes = state["mechanic_delta"]
        assert codes.dtype == (torch.int8 if delta == "int8" else delta)
        assert codes.shape == p.shape
        assert ("mechanic_delta_scales" in state) == (delta == "int8")
        if delta == "int8":
            assert state["mechanic_delta_scales"].shape == (-(-p.numel() // 256),)
        assert codes.any()


@every_storage
@both_paths
@pytest.mark.parametrize("base", [AdamW, SGD])
def test_training_comes_as_far(delta, wrap, base):
    losses = {}
    for chosen in (None, delta):
        model, optimizer = trained(chosen, wrap, base, steps=0)
        steps = 200
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        losses[chosen] = train(model, optimizer, steps, scheduler=schedule)
    assert losses[delta] <= 1.3 * losses[None]


# One step.


def one_step_of_sgd(delta, wrap, dtype=torch.float64):
    """The next step from a trained state, with gradients of our own: S, Delta, values before and after, and u."""
    model, optimizer = trained(delta, wrap, SGD, dtype=dtype, config={"forgetting": 0.0})
    params = list(model.parameters())
    before = scale(optimizer), [delta_of(optimizer, p) for p in params], [p.detach().clone() for p in params]
    optimizer.zero_grad()
    backward(model, 10)
    updates = [-p.grad for p in params]
    params[1].grad = None
    updates[1] = torch.zeros_like(updates[1])
    optimizer.step()
    after = scale(optimizer), [delta_of(optimizer, p) for p in params], [p.detach() for p in params]
    return before, after, updates


@both_paths
@rounded
def test_parameters_move_by_the_delta_that_is_not_yet_rounded(wrap, delta):
    (s, deltas, values), (new_s, _, new_values), updates = one_step_of_sgd(delta, wrap)
    assert s != new_s
    for d, x, new_x, u in zip(deltas, values, new_values, updates, strict=True):
        torch.testing.assert_close(new_x, x + new_s * (d + u) - s * d, rtol=0, atol=1e-12)


@both_paths
@rounded
def test_delta_is_within_a_gap_of_what_it_should_be(wrap, delta):
    (_, deltas, _), (_, new_deltas, _), updates = one_step_of_sgd(delta, wrap)
    for d, new_d, u in zip(deltas, new_deltas, updates, strict=True):
        assert (new_d - d - u).abs().max() <= GAP[delta] * (d + u).abs().max()
        assert not u.any() or not new_d.equal(d + u)


@both_paths
@rounded
def test_x_minus_s_delta_stays_where_it_was_in_the_mean(wrap, delta):
    """Every step moves it by S times what rounding has added, which has mean 0 and does not grow."""
    model = mlp(hidden=256, dtype=torch.float64)
    optimizer = wrap(AdamW(model.parameters(), lr=1.0, weight_decay=0.0), delta=delta)
    start = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 60)
    moved, gaps = [], []
    for p, x in zip(model.parameters(), start, strict=True):
        d = delta_of(optimizer, p)
        moved.append((p.detach() - scale(optimizer) * d - x).flatten())
        gaps.append((scale(optimizer) * GAP[delta] * d.abs().max()).expand(p.numel()))
    moved, gaps = torch.cat(moved), torch.cat(gaps)
    assert moved.abs().max() > 0
    assert moved.mean().abs() <= 4 * moved.std() / len(moved) ** 0.5
    assert (moved.abs() <= 60**0.5 * 4 * gaps).all()


def test_random_numbers_of_torch_stay_as_they_were():
    model, optimizer = trained("int8")
    backward(model, 0)
    before = torch.get_rng_state()
    optimizer.step()
    assert torch.get_rng_state().equal(before)


@rounded
def test_parts_do_not_change_the_step(monkeypatch, delta):
    whole, counts = snapshot(*trained(delta)), set()
    parts_of = buckets.parts_of
    monkeypatch.setattr(
        step, "parts_of", lambda *args, **one: counts.add(len(found := parts_of(*args, **one))) or found
    )
    for size in (1, 100, sum(p.numel() for p in mlp().parameters()) - 1):
        monkeypatch.setitem(buckets.PART, "cpu", size)
        assert same_bits(whole, snapshot(*trained(delta)))
    assert counts >= {2, 4}


def test_on_delta_what_comes_and_goes_does_not_grow_with_the_model():
    most = []
    for count in (16, 48):
        params = [torch.nn.Parameter(torch.zeros(512, 256)) for _ in range(count)]
        optimizer = Mechanic(AdamW(params, lr=1.0, fused=True), delta="int8")
        for p in params:
            p.grad = torch.ones_like(p)
        kept, _ = allocations(lambda: [optimizer.step() for _ in range(2)])  # noqa: B023
        elements = sum(p.numel() for p in params)
        assert kept / elements - 8 <= 1.05  # AdamW has two moments
        most.append(allocations(optimizer.step)[1])
    assert most[0] <= 10e6
    assert most[1] <= most[0] + 1e5


# Parameters of all kinds.


@both_paths
@rounded
def test_every_kind_of_parameter(wrap, delta):
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
    optimizer = wrap(AdamW(params, lr=1.0, weight_decay=0.1, foreach=False), delta=delta)
    for _ in range(30):
        for p in params:
            p.grad = p.detach() - 0.5
        optimizer.step()
    for p, x in zip(params, start, strict=True):
        assert p.isfinite().all()
        assert not p.numel() or (p - 0.5).abs().sum() < (x - 0.5).abs().sum()
        kept = optimizer.state[p]["mechanic_delta"].dtype
        assert kept == (torch.complex64 if p.is_complex() else torch.int8 if delta == "int8" else delta)
    twin = [torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params]
    resumed = wrap(AdamW(twin, lr=1.0, weight_decay=0.1, foreach=False), delta=delta)
    resumed.load_state_dict(saved(optimizer))
    for p, q in zip(params, twin, strict=True):
        for key, entry in optimizer.state[p].items():
            assert resumed.state[q][key].equal(entry)


def test_adamw_makes_its_state_of_bfloat16_parameters_in_bfloat16():
    model, optimizer = trained("int8", dtype=torch.bfloat16, steps=60)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16  # as bare AdamW's
    assert train_loss(model) < 1


def test_a_base_that_was_not_measured_keeps_the_state_of_half_precision_parameters_in_float32():
    model, optimizer = trained("int8", base=torch.optim.NAdam, dtype=torch.bfloat16, steps=60)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32
    assert train_loss(model) < 1


def test_a_resized_parameter_is_refused():
    model, optimizer = trained("int8")
    model[0].weight.data = torch.zeros(40, 64)
    model[0].weight.grad = torch.zeros(40, 64)
    with pytest.raises(ValueError, match=r"shape \(40, 64\) now, .* int8 codes cannot be"):
        optimizer.step()


# Going on.


@both_paths
@rounded
@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_a_copy_goes_on_bit_for_bit(wrap, delta, how):
    if how == "pickle" and wrap is on_copies:
        pytest.skip("a class of a test cannot be pickled")
    model, optimizer = trained(delta, wrap)
    if how == "state_dict":
        twin = copy.deepcopy(model)
        other = wrap(AdamW(twin.parameters(), lr=1.0), delta=delta)
        other.load_state_dict(saved(optimizer))
    elif how == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    else:
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    assert same_bits(snapshot(model, optimizer), snapshot(twin, other))
    for each, of in ((model, optimizer), (twin, other)):
        train(each, of, 5, first=10)
    assert same_bits(snapshot(model, optimizer), snapshot(twin, other))


@rounded
def test_a_checkpoint_has_plain_tensors_of_the_parameters_shape(delta):
    model, optimizer = trained(delta)
    state_dict = saved(optimizer)
    for key, p in enumerate(model.parameters()):
        entry = state_dict["state"][key]
        assert entry["mechanic_delta"].shape == p.shape
        assert entry["mechanic_delta"].dtype == (torch.float32 if delta == "int8" else delta)
        assert "mechanic_delta_scales" not in entry
        assert entry["mechanic_delta"].double().equal(delta_of(optimizer, p))
    assert optimizer.state[model[0].weight]["mechanic_delta"].dtype != torch.float32  # the state is as it was


@pytest.mark.parametrize("after", [None, *STORAGES.values()], ids=["default", *STORAGES])
@pytest.mark.parametrize("before", [None, *STORAGES.values()], ids=["default", *STORAGES])
def test_a_checkpoint_loads_into_every_storage(before, after):
    model, optimizer = trained(before)
    twin = copy.deepcopy(model)
    other = Mechanic(AdamW(twin.parameters(), lr=1.0), delta=after)
    other.load_state_dict(saved(optimizer))
    assert other.scales() == optimizer.scales()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        delta, found = delta_of(optimizer, p), delta_of(other, q)
        assert (found - delta).abs().max() <= 0.5 * GAP.get(after, 0.0) * delta.abs().max()
        expected = {"int8": torch.int8, torch.bfloat16: torch.bfloat16}.get(after, torch.float32)
        assert other.state[q]["mechanic_delta"].dtype == expected
        assert ("mechanic_delta_scales" in other.state[q]) == (after == "int8")
    assert train(twin, other, 60, first=10) < 1


SPOILS = {
    "codes": (lambda delta: delta.to(torch.int8), "codes of shape"),
    "another shape": (lambda delta: delta[:1], "shape"),
    "a number": (lambda delta: 0.5, "0.5"),
}


@rounded
@pytest.mark.parametrize("kind", SPOILS)
def test_a_spoilt_delta_is_refused_by_name_and_nothing_changes(delta, kind):
    model, optimizer = trained(delta)
    state_dict, (spoil, words) = saved(optimizer), SPOILS[kind]
    state_dict["state"][2]["mechanic_delta"] = spoil(state_dict["state"][2]["mechanic_delta"])
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=rf"state\[2\]\['mechanic_delta'\].*{words}"):
        optimizer.load_state_dict(state_dict)
    assert same_bits(before, snapshot(model, optimizer))


@pytest.mark.parametrize("into", [None, *STORAGES.values()], ids=["default", *STORAGES])
def test_the_state_dict_of_the_base_itself_is_refused(into):
    """It has codes, which mean nothing without their scales."""
    _, optimizer = trained("int8")
    model, other = trained(into)
    before = snapshot(model, other)
    with pytest.raises(ValueError, match=r"state\[0\]\['mechanic_delta'\]: the checkpoint has codes"):
        other.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    assert same_bits(before, snapshot(model, other))


# All else that may happen to an optimizer.


def said_beside(error, otherwise):
    """The notes on an error, which Python has from 3.11 on."""
    return " ".join(error.__notes__) if sys.version_info >= (3, 11) else otherwise


@rounded
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_base_that_fails_has_moved_nothing(delta, share):
    model, optimizer = trained(delta)
    before = [p.detach().clone() for p in model.parameters()], [delta_of(optimizer, p) for p in model.parameters()]
    backward(model, 10)
    with failing(optimizer.base, MemoryError(), share=share), pytest.raises(MemoryError) as caught:
        optimizer.step()
    assert "no parameter has moved" in said_beside(caught.value, otherwise="no parameter has moved")
    assert same_bits(before[0], [p.detach() for p in model.parameters()])
    assert same_bits(before[1], [delta_of(optimizer, p) for p in model.parameters()])
    optimizer.step()


@rounded
def test_a_base_that_fails_in_a_later_part_leaves_every_parameter_before_or_after_its_step(monkeypatch, delta):
    monkeypatch.setitem(buckets.PART, "cpu", 100)
    (model, optimizer), (twin_model, twin) = (trained(delta, base=SGD, dtype=torch.float64) for _ in range(2))
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

    monkeypatch.setattr(SGD, "_init_group", fail_in_the_third_part)
    with pytest.raises(MemoryError) as caught:
        optimizer.step()
    monkeypatch.undo()
    assert "some parameters have made their step" in said_beside(caught.value, "some parameters have made their step")
    assert scale(optimizer) == scale(twin)
    after, now = snapshot(twin_model, twin)[:4], snapshot(model, optimizer)[:4]
    assert {torch.equal(x, a) for x, a in zip(now, after, strict=True)} == {True, False}
    assert all(torch.equal(x, b) or torch.equal(x, a) for x, b, a in zip(now, before, after, strict=True))
    train(model, optimizer, 3, first=11)


@both_paths
@rounded
def test_observed_skipped_and_bad_gradients(wrap, delta):
    model, optimizer = trained(delta, wrap, skip_nonfinite=True)
    before = snapshot(model, optimizer)
    backward(model, 30)
    optimizer.observe()
    assert same_bits(before, snapshot(model, optimizer))
    optimizer.zero_grad()
    backward(model, 31)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert same_bits(before[:4], [p.detach() for p in model.parameters()])
    model, optimizer = trained(delta, wrap)
    backward(model, 31)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert optimizer.nonfinite_steps == 1
    assert all(p.isfinite().all() for p in model.parameters())
    assert train(model, optimizer, 60, first=31) < 1


@both_paths
@rounded
def test_a_step_at_lr_0_moves_no_parameter(wrap, delta):
    model, optimizer = trained(delta, wrap)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    backward(model, 10)
    optimizer.step()
    assert same_bits(before, [p.detach() for p in model.parameters()])


@rounded
def test_freezing_and_releasing_drop_all_of_it(delta):
    model, optimizer = trained(delta, steps=40)
    former = optimizer.scales()
    optimizer.freeze()
    assert optimizer.scales() == former
    assert not any("mechanic_delta" in key for state in optimizer.state.values() for key in state)
    train(model, optimizer, 5, first=40)
    base = optimizer.release()
    assert not any(key.startswith("mechanic_") for state in base.state.values() for key in state)
    assert train(model, base, 40, first=45) < 1


@rounded
def test_a_group_that_is_added_gets_a_delta_of_the_same_kind(delta):
    model = mlp()
    optimizer = Mechanic(AdamW(model[0].parameters(), lr=1.0), delta=delta)
    train(model, optimizer, 5)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    train(model, optimizer, 5, first=5)
    dtypes = {optimizer.state[p]["mechanic_delta"].dtype for p in model.parameters()}
    assert dtypes == {torch.int8 if delta == "int8" else delta}


@rounded
def test_own_iterates(delta):
    losses = {}
    for chosen in (None, delta):
        model = mlp()
        optimizer = Mechanic(schedulefree.AdamWScheduleFree(model.parameters(), lr=1.0), delta=chosen)
        optimizer.train()
        train(model, optimizer, 150)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.eval()
        losses[chosen] = train_loss(model)
        optimizer.train()
        for p, x in zip(model.parameters(), before, strict=True):
            assert (p - x).abs().max() <= 0.02 * x.abs().max()
    assert losses[delta] <= 1.3 * losses[None]


def test_several_optimizers_together_step_part_by_part(monkeypatch):
    def run():
        model = mlp()
        parts = SGD(model[0].parameters(), lr=1.0, momentum=0.9), AdamW(model[2].parameters(), lr=1.0)
        optimizer = Mechanic(Together(*parts), per_group=True, delta="int8")
        train(model, optimizer, 30)
        return snapshot(model, optimizer)

    whole = run()
    monkeypatch.setitem(buckets.PART, "cpu", 100)
    assert same_bits(whole, run())


@pytest.mark.parametrize("name", ["Lion", "Muon", "SOAP", "Adafactor", "AdamW tensor lr"])
def test_bases_that_look_at_values(name):
    base = BY_NAME[name]
    model = base.model()
    optimizer = Mechanic(base.make(model.parameters()), delta="int8")
    assert train(model, optimizer, 60) < 1


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_does_not_matter(default):
    def trained():
        model = torch.nn.Linear(40, 30, dtype=torch.float32)
        optimizer = Mechanic(SGD(model.parameters(), lr=1.0, momentum=0.9), delta="int8")
        for index in range(5):
            for p in model.parameters():
                p.grad = torch.cos(3 * p.detach() + index)
            optimizer.step()
        return model, optimizer

    torch.manual_seed(0)
    expected = snapshot(*trained())
    torch.manual_seed(0)
    torch.set_default_dtype(default)
    try:
        found = snapshot(*trained())
    finally:
        torch.set_default_dtype(torch.float32)
    assert same_bits(found, expected)


@rounded
def test_fake_tensors_can_be_stepped_with(delta):
    with FakeTensorMode():
        model = torch.nn.Linear(4, 1)
        optimizer = Mechanic(AdamW(model.parameters(), lr=1.0), delta=delta)
        for _ in range(2):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert optimizer.state[model.weight]["mechanic_delta"].itemsize == (1 if delta == "int8" else 2)
