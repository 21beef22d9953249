"""bfloat16 parameters with a Delta in few bytes: the base sees them as they are, and its state stays as it makes it."""

import copy

import pytest
import torch
from torch.optim import SGD, AdamW

from mechanic.torch import Mechanic, Together, buckets
from mechanic.torch.buckets import decoded
from tests.torch.memory import allocations
from tests.torch.paths import failing, instead_of_its_step
from tests.torch.task import backward, mlp, same_bits, scale, snapshot, train, train_loss

SMALL = torch.bfloat16, "int8"
small = pytest.mark.parametrize("delta", SMALL, ids=["bfloat16", "int8"])
MOMENTS = "exp_avg", "exp_avg_sq"


def trained(delta="int8", steps=10, cls=AdamW, wrap=Mechanic, model=None, **options):
    model = mlp(dtype=torch.bfloat16) if model is None else model
    optimizer = wrap(cls(model.parameters(), lr=1.0, **options), delta=delta)
    train(model, optimizer, steps)
    return model, optimizer


def dtypes_of(optimizer, keys=MOMENTS):
    return {state[key].dtype for state in optimizer.state.values() for key in keys if key in state}


def value_of(p, optimizer):
    return p.detach().double() + optimizer.state[p]["mechanic_residual"].double()


@small
def test_what_is_kept_and_what_a_step_takes_in_passing(delta):
    shapes = [(512, 512), (512,)] * 12
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    optimizer = Mechanic(AdamW(params, lr=1.0, fused=True), delta=delta)
    for p in params:
        p.grad = torch.ones_like(p)
    elements = sum(p.numel() for p in params)
    kept, _ = allocations(lambda: [optimizer.step() for _ in range(2)])
    _, most = allocations(optimizer.step)
    assert kept / elements <= (7.1 if delta == "int8" else 8.1)
    assert most <= 8e6  # of which the zeros of one part are 2 MB, and what becomes of its parameters as much


@small
def test_the_moments_are_the_bases_own_and_its_gradients_no_copies(delta):
    model, optimizer = trained(delta)
    assert dtypes_of(optimizer) == {torch.bfloat16}
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
    assert dtype == torch.bfloat16
    assert seen_grad is grad is model[0].weight.grad
    assert not any_value


def test_the_update_is_that_of_the_bare_base_to_the_bit():
    """With weight decay, which Mechanic adds to it in float32."""
    model, bare_model = mlp(dtype=torch.bfloat16), mlp(dtype=torch.bfloat16)
    optimizer = Mechanic(AdamW(model.parameters(), lr=1.0, weight_decay=0.0), delta="int8", config={"forgetting": 0.0})
    bare = AdamW(bare_model.parameters(), lr=1.0, weight_decay=0.0)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step)
        for p, q in zip(model.parameters(), bare_model.parameters(), strict=True):
            q.data.zero_()
            q.grad = p.grad.clone()
        optimizer.step()
        bare.step()
    for p, q in zip(model.parameters(), bare_model.parameters(), strict=True):
        for key in MOMENTS:
            assert optimizer.state[p][key].equal(bare.state[q][key])


@small
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_x_stays_at_the_start_plus_s_delta(delta, decay):
    """Within the rounding of Delta, of which 30 steps add up."""
    model = mlp(dtype=torch.bfloat16)
    start = [p.detach().double() for p in model.parameters()]
    model, optimizer = trained(delta, steps=30, model=model, weight_decay=decay)
    for p, x_1 in zip(model.parameters(), start, strict=True):
        moved = scale(optimizer) * decoded(optimizer.state[p])["mechanic_delta"].double()
        assert (value_of(p, optimizer) - x_1 - moved).norm() <= 0.1 * moved.norm()


@pytest.mark.parametrize("name", ["Adagrad", "Adamax", "NAdam", "Rprop"])
def test_bases_that_lose_too_much_in_bfloat16_keep_float32(name):
    _, optimizer = trained(cls=getattr(torch.optim, name), steps=5)
    tensors = [value for state in optimizer.state.values() for key, value in state.items() if "mechanic" not in key]
    assert {value.dtype for value in tensors if value.ndim} == {torch.float32}


def test_float16_keeps_float32_since_an_eps_of_1e_8_is_zero_there():
    model, optimizer = trained(model=mlp(dtype=torch.float16), steps=5)
    assert dtypes_of(optimizer) == {torch.float32}
    assert train_loss(model) > 0


@small
def test_where_the_base_must_see_the_values_it_sees_float32(delta):
    _, optimizer = trained(delta, steps=5, cls=SGD, momentum=0.9, weight_decay=1e-3)
    assert dtypes_of(optimizer, (*MOMENTS, "momentum_buffer")) == {torch.float32}


def test_moments_are_cast_where_weight_decay_that_needs_the_values_comes_and_goes():
    model, optimizer = trained(steps=5, cls=torch.optim.Adam)
    optimizer.param_groups[0]["weight_decay"] = 1e-3
    train(model, optimizer, 5, first=5)
    assert dtypes_of(optimizer) == {torch.float32}
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert train(model, optimizer, 40, first=10) < 1
    assert dtypes_of(optimizer) == {torch.bfloat16}


@small
def test_a_resumed_run_goes_on_bit_for_bit(delta):
    model, optimizer = trained(delta)
    twin = copy.deepcopy(model)
    resumed = Mechanic(AdamW(twin.parameters(), lr=1.0), delta=delta)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same_bits(snapshot(model, optimizer), snapshot(twin, resumed))
    for each in ((model, optimizer), (twin, resumed)):
        train(*each, 5, first=10)
    assert same_bits(snapshot(model, optimizer), snapshot(twin, resumed))


def test_a_checkpoint_goes_from_float32_moments_to_bfloat16_ones_and_back():
    model, optimizer = trained(delta=None)
    other = Mechanic(AdamW(model.parameters(), lr=1.0), delta="int8")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert dtypes_of(optimizer) == {torch.float32}
    assert dtypes_of(other) == {torch.bfloat16}
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert dtypes_of(optimizer) == {torch.float32}
    assert train(model, optimizer, 40, first=10) < 1


def test_a_base_with_state_of_its_own_keeps_it_when_wrapped():
    model = mlp(dtype=torch.bfloat16)
    plain = AdamW(model.parameters(), lr=0.01)
    train(model, plain, 3)
    before = {p: plain.state[p]["exp_avg"].clone() for p in model.parameters()}
    optimizer = Mechanic(plain, delta="int8")
    assert all(optimizer.state[p]["exp_avg"].equal(kept) for p, kept in before.items())
    assert train(model, optimizer, 40, first=3) < 1


def test_a_step_at_lr_0_moves_no_bit_and_makes_no_float32_state():
    for steps in (0, 10):
        model, optimizer = trained(steps=steps, weight_decay=0.1)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[0]["lr"] = 0.0
        backward(model, 10)
        optimizer.step()
        assert same_bits(before, [p.detach() for p in model.parameters()])
        assert dtypes_of(optimizer) == {torch.bfloat16}


@small
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_base_that_fails_has_moved_nothing(delta, share):
    model, optimizer = trained(delta)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    backward(model, 10)
    grads = [p.grad.clone() for p in model.parameters()]
    with failing(optimizer.base, MemoryError(), share=share), pytest.raises(MemoryError):
        optimizer.step()
    assert same_bits(before, [p.detach() for p in model.parameters()])
    assert same_bits(grads, [p.grad for p in model.parameters()])
    optimizer.step()


def test_parts_give_the_bits_of_the_whole(monkeypatch):
    whole = snapshot(*trained())
    monkeypatch.setitem(buckets.PART, "cpu", 100)
    assert same_bits(whole, snapshot(*trained()))


@small
def test_a_frozen_scale_steps_as_the_tuned_one_did_and_is_released(delta):
    model, optimizer = trained(delta, steps=60, weight_decay=0.1)
    twin = copy.deepcopy(model)
    wide = Mechanic(AdamW(twin.parameters(), lr=1.0, weight_decay=0.1))
    wide.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    start = [value_of(p, optimizer) for p in model.parameters()]
    for each in ((model, optimizer), (twin, wide)):
        each[1].freeze()
        train(*each, 1, first=60)
    assert dtypes_of(optimizer) == {torch.bfloat16}
    for x, p, q in zip(start, model.parameters(), twin.parameters(), strict=True):
        moved, expected = value_of(p, optimizer) - x, value_of(q, wide) - x
        assert (moved - expected).norm() <= 0.01 * expected.norm()
    base = optimizer.release()
    assert not any(key.startswith("mechanic_") for state in base.state.values() for key in state)
    assert train(model, base, 20, first=61) < 1


def test_observed_gradients_copies_and_groups():
    model, optimizer = trained()
    backward(model, 30)
    optimizer.observe()
    train(model, optimizer, 1, first=31)
    twin_model, twin = copy.deepcopy((model, optimizer))
    for each in ((model, optimizer), (twin_model, twin)):
        train(*each, 3, first=32)
    assert same_bits(snapshot(model, optimizer), snapshot(twin_model, twin))
    model = mlp(dtype=torch.bfloat16)
    parts = SGD(model[0].parameters(), lr=1.0, momentum=0.9), AdamW(model[2].parameters(), lr=1.0)
    optimizer = Mechanic(Together(*parts), per_group=True, delta="int8")
    assert train(model, optimizer, 80) < 1
    assert dtypes_of(optimizer, (*MOMENTS, "momentum_buffer")) == {torch.bfloat16}


def test_dtypes_side_by_side():
    model = mlp(dtype=torch.bfloat16)
    model[2].float()
    model[1] = torch.nn.Sequential(torch.nn.ReLU(), Widen())
    optimizer = Mechanic(AdamW(model.parameters(), lr=1.0), delta="int8")
    assert train(model, optimizer, 60) < 1
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[model[2].weight]["exp_avg"].dtype == torch.float32
    optimizer.freeze()
    assert train(model, optimizer, 5, first=60) < 1


class Widen(torch.nn.Module):
    def forward(self, x):
        return x.float()
