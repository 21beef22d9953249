"""bfloat16 and float16 parameters train as float32 ones do."""

import copy
import statistics

import pytest
import torch

from mechanic.torch import Mechanic
from mechanic.torch.delta import RESIDUAL_DTYPE
from tests.torch import half_precision
from tests.torch.task import assert_go_on_alike, backward, mlp, same_bits, scale, train, values_of

HALF = [torch.bfloat16, torch.float16]
BASES = ["AdamW", "SGD momentum", "Lion"]


def assert_follows_float32(task, base, dtype, starts=1, **options):
    def median_run(kind):
        runs = (
            half_precision.run(half_precision.TASKS[task], base, dtype, kind, start=start, **options)
            for start in range(starts)
        )
        return map(statistics.median, zip(*runs, strict=True))

    loss, learned = median_run("float32")
    for kind in ("half", "mixed"):
        half_loss, half_learned = median_run(kind)
        assert half_loss == pytest.approx(loss, rel=0.03)
        assert half_learned == pytest.approx(learned, rel=0.10)


@pytest.mark.long
@pytest.mark.parametrize(("base", "dtype"), [("AdamW", torch.bfloat16), ("Lion", torch.float16)], ids=str)
def test_digits_follow_the_float32_run_to_the_end_of_a_cosine(base, dtype):
    assert_follows_float32("digits", base, dtype, steps=500)


@pytest.mark.long
def test_a_transformer_follows_the_float32_run_to_the_end_of_a_cosine():
    assert_follows_float32("shakespeare", "AdamW", torch.bfloat16, steps=200)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("task", half_precision.TASKS)
def test_long_runs_follow_with_every_base_and_dtype(task, base, dtype):
    assert_follows_float32(task, base, dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_steps_below_the_last_bit_add_up(dtype):
    """A hundred steps of a hundredth of the last bit: alone each is lost, together they are a whole bit."""
    last_bit = torch.finfo(dtype).eps
    p = torch.nn.Parameter(torch.full((4,), 1.5, dtype=dtype))
    optimizer = Mechanic(torch.optim.SGD([p], lr=1.0))
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    learned = optimizer.scales()["default"]
    optimizer.freeze()
    before, stored = p.detach().float().clone(), p.detach().clone()
    for _ in range(100):
        p.grad = torch.full_like(p, last_bit / 100 / learned)
        optimizer.step()
    assert ((before - p.detach().float()) / last_bit).tolist() == [1.0] * 4
    for _ in range(100):
        stored -= last_bit / 100
    assert stored.float().equal(before)  # as it would go without a residual


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_none_of_100000_values_is_lost_however_it_is_rounded(dtype, frozen):
    """What is stored stays within half a bit of the exact value, also where rounding cuts off very nearly that much."""
    generator = torch.Generator().manual_seed(0)
    last_bit = torch.finfo(dtype).eps  # of all values between 1 and 2
    p = torch.nn.Parameter((1.4 + 0.2 * torch.rand(100_000, generator=generator)).to(dtype))
    exact = p.detach().double()
    optimizer = Mechanic(torch.optim.SGD([p], lr=1.0), delta=torch.float32)

    def moved():
        """S Delta; of a frozen scale there is no Delta."""
        return 0.0 if optimizer.is_frozen else scale(optimizer) * optimizer.state[p]["mechanic_delta"].double()

    for step in range(20):
        size = last_bit / max(scale(optimizer), last_bit)
        p.grad = (size * torch.randn(p.shape, generator=generator)).to(dtype)
        gradient, before = p.grad.double(), moved() if step else 0.0
        optimizer.step()
        exact += -scale(optimizer) * gradient if optimizer.is_frozen else moved() - before
        if frozen and step == 2:
            optimizer.freeze()
    assert 1.0 < exact.min() < exact.max() < 2.0
    assert not exact.equal(p.detach().double())
    # Eight bits of a residual are kept, so that every step may add 2^-9 of half a bit.
    assert (p.detach().double() - exact).abs().max() / last_bit <= 0.5 + 20 * 2**-10


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_what_others_write_survives_in_every_dtype(dtype):
    for write in (lambda p: p.clamp_(-0.01, 0.01), lambda p: p.zero_(), lambda p: p.mul_(3)):
        model = mlp(dtype=dtype)
        optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
        train(model, optimizer, 20)
        with torch.no_grad():
            for p in model.parameters():
                write(p)
        written = values_of(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()  # moves nothing, but rounds the parameters anew
        assert same_bits(written, [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("delta", [None, torch.float32], ids=str)
def test_what_is_kept_of_a_parameter_and_a_load_keeps_every_dtype(delta, dtype):
    model = mlp(dtype=dtype)
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0), delta=delta)
    train(model, optimizer, 3)
    state = optimizer.state[model[0].weight]
    dtypes = {key: value.dtype for key, value in state.items()}
    assert dtypes["mechanic_delta"] == (delta or torch.bfloat16)
    in_bfloat16 = delta is None and dtype == torch.bfloat16  # float16 is too narrow for AdamW's eps
    assert dtypes["exp_avg"] == dtypes["exp_avg_sq"] == (torch.bfloat16 if in_bfloat16 else torch.float32)
    assert dtypes["mechanic_residual"] == RESIDUAL_DTYPE
    assert model[0].weight.dtype == dtype
    twin_model = copy.deepcopy(model)
    twin = Mechanic(torch.optim.AdamW(twin_model.parameters(), lr=1.0), delta=delta)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {key: value.dtype for key, value in twin.state[twin_model[0].weight].items()} == dtypes
    assert_go_on_alike((model, optimizer), (twin_model, twin), steps=3, first=3)


def test_a_model_that_is_cast_to_float32_in_mid_training_has_no_residual_any_more():
    model = mlp(dtype=torch.bfloat16)
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
    train(model, optimizer, 3)
    held = optimizer.state_dict()["state"]
    model.float()
    train(model, optimizer, 3, first=3)
    assert all("mechanic_residual" not in optimizer.state[p] for p in model.parameters())
    assert all("mechanic_residual" in entry for entry in held.values())


@pytest.mark.parametrize(
    ("base", "delta"), [(torch.optim.Adagrad, None), (torch.optim.AdamW, None), (torch.optim.AdamW, torch.float32)]
)
def test_a_base_with_half_precision_state_of_its_own_can_be_wrapped_and_loaded(base, delta):
    model = mlp(dtype=torch.bfloat16)
    plain = base(model.parameters(), lr=0.01)
    train(model, plain, 3)
    saved = copy.deepcopy(plain.state_dict())
    wrapped = Mechanic(plain, delta=delta)  # in mid-training
    kept = wrapped.state[model[0].weight]
    assert all(kept[key].to(value.dtype).equal(value) for key, value in saved["state"][0].items())
    assert train(model, wrapped, 40, first=3) < 1
    optimizer = Mechanic(base(model.parameters(), lr=0.01), delta=delta)
    with pytest.warns(UserWarning, match="fresh tuner"):
        optimizer.load_state_dict(saved)
    train(model, optimizer, 3)
    assert optimizer.scales()["default"] > 0


@pytest.mark.parametrize("fused", [False, True])
def test_sgd_trains_bfloat16_parameters_also_where_its_fused_step_does_not(fused):
    """On a CPU, torch's fused step leaves most elements of bfloat16 parameters where they are."""
    p = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = Mechanic(torch.optim.SGD([p], lr=1.0, momentum=0.9, fused=fused))
    for _ in range(3):
        p.grad = torch.full_like(p, -1.0)
        optimizer.step()
    assert p.min() == p.max() > 0


def test_grad_scaler_refuses_half_precision_gradients_by_itself():
    """Which is why a loss scale has to be divided out by hand; docs/everyday.md says so."""
    model = mlp(dtype=torch.float16)
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
    backward(model, 0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_frozen_weights_decay_by_s_times_the_rate(decay):
    """Where the base steps on zeros, which do not decay, Mechanic adds the decay."""
    model = mlp(dtype=torch.bfloat16)
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=decay))
    train(model, optimizer, 20)
    optimizer.freeze()

    def values():
        return [p.detach().float() + optimizer.state[p]["mechanic_residual"].float() for p in model.parameters()]

    before = values()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][key].zero_()
    optimizer.step()
    expected = [x * (1 - decay * scale(optimizer)) for x in before]
    torch.testing.assert_close(values(), expected, rtol=1e-4, atol=1e-7)
