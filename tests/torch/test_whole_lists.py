"""Off the CPU lists are worked on as a whole. Here that code runs on the CPU, and must do what the other code does."""

import pytest
import torch
from torch.optim import SGD, AdamW

from mechanic.config import TunerConfig
from mechanic.torch import Mechanic, arrays, step
from mechanic.torch.kernels import eager, rounding, whole
from mechanic.tuner import TunerState, delta_retention, update
from tests.torch.paths import on_copies

CPU = torch.device("cpu")
SHAPES = [(7,), (33, 41), (), (0,), (1,), (300,), (4, 3, 5, 2), (1025,), (40, 30)]


@pytest.fixture(params=["long and short", "all long", "all short", "without 0-dim factors"])
def off_the_cpu(request, monkeypatch):
    """A function that turns the code for other devices on."""

    def turn_on():
        long, pack = {"all long": (1, 100), "all short": (1 << 21, 500)}.get(request.param, (300, 1000))
        monkeypatch.delitem(eager.PIECE, "cpu")
        monkeypatch.setattr(whole, "LONG", long)
        monkeypatch.setattr(whole, "LONGEST_PACK", pack)
        monkeypatch.setattr(whole, "TAKES_ZERO_DIM_FACTORS", request.param != "without 0-dim factors")
        monkeypatch.setattr(step, "array_module", lambda device: arrays.FewerLaunches())

    return turn_on


def tensors(dtype, seed=0, size=1.0):
    """Of every shape, in several memory orders."""
    generator = torch.Generator().manual_seed(seed)
    made = [(size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in SHAPES]
    made[6] = made[6].to(memory_format=torch.channels_last)
    made[8] = made[8].T
    return made


def contiguous_in_part(grads):
    """As a backward pass may leave them: not always in the order of the parameters."""
    return [grad.contiguous() if index == 6 else grad for index, grad in enumerate(grads)]


def run(build, dtype, steps=8):
    """Parameters, all state and the tuners after steps with bad, missing and expanded gradients."""
    params = [torch.nn.Parameter(tensor) for tensor in tensors(dtype)]
    optimizer = build(params)
    for number in range(steps):
        for p, grad in zip(params, contiguous_in_part(tensors(dtype, seed=1 + number, size=0.1)), strict=True):
            p.grad = grad
        if number in (2, 3, 4):
            overflows = torch.finfo(rounding.working_dtype(dtype)).max ** 0.75  # if it is squared
            params[1].grad[3, 4] = (float("nan"), float("inf"), overflows)[number - 2]
        if number == 5:
            params[0].grad = params[6].grad = None
        if number == 6:
            if not optimizer.param_groups[0]["fused"]:  # torch's fused step would read behind its end
                params[5].grad = torch.full((1,), 0.25, dtype=dtype).expand(300)
            with torch.no_grad():
                params[1].mul_(1.5)  # somebody writes to it
        optimizer.step()
    state = [tensor for p in params for _, tensor in sorted(optimizer.state[p].items()) if tensor.is_floating_point()]
    return params, state, torch.stack([group["mechanic_tuner"] for group in optimizer.param_groups])


def in_groups(params):
    return [{"params": params[:3], "lr": 1.0}, {"params": params[3:6], "lr": 0.5}, {"params": params[6:], "lr": 1.0}]


BUILDS = {
    "AdamW": lambda p: Mechanic(AdamW(p, lr=1.0, weight_decay=0.1)),
    "AdamW fused": lambda p: Mechanic(AdamW(p, lr=1.0, fused=True)),
    "AdamW on copies": lambda p: on_copies(AdamW(p, lr=1.0, fused=True)),
    "SGD": lambda p: Mechanic(SGD(p, lr=1.0, momentum=0.9)),
    "SGD on copies, ascending": lambda p: Mechanic(SGD(p, lr=1.0, momentum=0.9, weight_decay=0.1, maximize=True)),
    "three tuners": lambda p: Mechanic(AdamW(in_groups(p), lr=1.0), per_group=True),
    "three groups": lambda p: Mechanic(AdamW(in_groups(p), lr=1.0)),
    "the paper": lambda p: Mechanic(AdamW(p, lr=1.0), config=TunerConfig.paper()),
    "skipping": lambda p: Mechanic(AdamW(p, lr=1.0), skip_nonfinite=True),
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_steps_are_those_of_the_cpu(name, dtype, tolerance, off_the_cpu):
    expected = run(BUILDS[name], dtype)
    off_the_cpu()
    found = run(BUILDS[name], dtype)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["AdamW", "SGD on copies, ascending", "three tuners"])
def test_steps_in_half_precision_are_those_of_the_cpu(name, dtype, off_the_cpu):
    def values(result):
        params, state, tuners = result
        residuals = [tensor for tensor in state if tensor.dtype == torch.bfloat16]
        wide = [p.float() + residual.float() for p, residual in zip(params, residuals, strict=True)]
        return wide, [tensor for tensor in state if tensor.dtype == torch.float32], tuners

    expected = run(BUILDS[name], dtype)
    off_the_cpu()
    found = run(BUILDS[name], dtype)
    # What a parameter stands for has 16 bits in bfloat16 with its residual.
    torch.testing.assert_close(values(found)[0], values(expected)[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(values(found)[1:], values(expected)[1:], rtol=1e-5, atol=1e-5)
    differing = sum((p != q).sum().item() for p, q in zip(found[0], expected[0], strict=True))
    assert differing <= 3  # where a tie is rounded the other way


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_steps_with_complex_parameters_are_those_of_the_cpu(dtype, off_the_cpu):
    def run_complex():
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((30, 20), (5,))]
        optimizer = Mechanic(SGD(params, lr=1.0, momentum=0.9, foreach=False))
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape[::-1], dtype=dtype).T.conj() if p.ndim == 2 else torch.randn_like(p)
            optimizer.step()
        return params, optimizer.param_groups[0]["mechanic_tuner"]

    expected = run_complex()
    off_the_cpu()
    tolerance = 1e-12 if dtype == torch.complex128 else 1e-6
    torch.testing.assert_close(run_complex(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("decay", "retention"), [(0.0, None), (0.25, None), (0.0, 0.9), (0.25, 0.9)])
def test_every_kernel_is_that_of_the_cpu(decay, retention, off_the_cpu):
    scale, change = torch.tensor(0.5, dtype=torch.float64), torch.tensor(-0.125, dtype=torch.float64)
    kept = None if retention is None else torch.tensor(retention, dtype=torch.float64)
    calls = {
        "combine": (3, (scale, change, kept)),
        "prepare_delta": (2, (scale, decay, kept)),
        "restore_delta": (2, (scale, decay, kept)),
        "add_scaled": (2, (scale,)),
        "add_scaled_step": (2, (scale,)),
    }
    results = []
    for turn_on in (lambda: None, off_the_cpu):
        turn_on()
        for name, (count, arguments) in calls.items():
            lists = [tensors(torch.float64, seed) for seed in range(count)]
            getattr(eager, name)(*lists, *arguments)
            results.append(lists)
    torch.testing.assert_close(results[5:], results[:5], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("present", ["gd", "d", ""])
def test_the_five_sums_are_those_of_the_cpu(dtype, present, off_the_cpu):
    x, g = tensors(dtype), contiguous_in_part(tensors(dtype, seed=1)) if "g" in present else []
    d = tensors(rounding.working_dtype(dtype), seed=2) if "d" in present else []
    expected = eager.measure(x, g, d, -1.0, CPU)
    expected_norm = eager.squared_norm(x, CPU)
    off_the_cpu()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    grad_norm, norm, delta_norm = expected[2:].sqrt()
    of_norms = torch.stack([delta_norm * grad_norm, delta_norm * norm, *expected[2:]])  # inner products may cancel
    assert ((eager.measure(x, g, d, -1.0, CPU) - expected).abs() <= tolerance * of_norms).all()
    torch.testing.assert_close(eager.squared_norm(x, CPU), expected_norm, rtol=tolerance, atol=0)


@pytest.mark.parametrize("empty", [[], [torch.zeros(0), torch.zeros(2, 0)]], ids=["no tensors", "empty ones"])
def test_sums_over_nothing_are_zero(empty, off_the_cpu):
    off_the_cpu()
    assert eager.measure(empty, empty, empty, 1.0, CPU).tolist() == [0.0] * 5
    assert eager.squared_norm(empty, CPU).item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e30])
def test_gradients_out_of_range_are_seen(bad, off_the_cpu):
    x, g, d = (tensors(torch.float32, seed) for seed in range(3))
    g[7][1000] = bad
    off_the_cpu()
    assert not eager.measure(x, g, d, 1.0, CPU)[2].isfinite()
    assert not eager.squared_norm(g, CPU).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_that_of_the_cpu_bit_for_bit(dtype, off_the_cpu):
    results = []
    for turn_on in (lambda: None, off_the_cpu):
        turn_on()
        params, values = tensors(dtype), tensors(torch.float32, seed=1)
        values[7][:3] = torch.tensor([float("nan"), float("inf"), 1e30])
        residuals = [torch.zeros_like(p, dtype=torch.bfloat16) for p in params]
        eager.store_rounded(values, params, residuals)
        params[1][:5] += 1.0  # somebody writes to it
        read = eager.values_of(params, residuals)
        assert [value.stride() for value in read] == [p.stride() for p in params]
        results.append([*params, *residuals, *read])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_copies_have_the_layout_of_their_originals(off_the_cpu):
    off_the_cpu()
    gaps = torch.randn(8, 6)[:, ::2]
    for dtype in (torch.float32, torch.float64):
        originals = [*tensors(torch.float32), gaps]
        copies = eager.copies_of(originals, dtype)
        for copy, original in zip(copies, originals, strict=True):
            assert copy.equal(original.to(dtype))
            assert copy.stride() == original.to(dtype, copy=True).stride()
            assert copy.storage_offset() * copy.itemsize % 16 == 0
        copies[1].zero_()
        assert originals[1].all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_clearing_zeroes_everything_or_nothing(dtype, off_the_cpu):
    values = torch.tensor([1.5, -2.0, float("inf"), float("nan"), -0.0, 1e-40]).to(dtype)
    off_the_cpu()
    lists = {flag: [values.clone(), torch.ones(3), values.clone().reshape(2, 3).T] for flag in (True, False)}
    for flag, cleared in lists.items():
        eager.clear_unless(torch.tensor(flag), cleared)
    assert lists[True][0].view(torch.uint8).equal(values.view(torch.uint8))
    assert lists[True][2].T.reshape(-1).contiguous().view(torch.uint8).equal(values.view(torch.uint8))
    assert not any(tensor.contiguous().view(torch.uint8).any() for tensor in lists[False])


def test_the_tuner_is_the_same_in_fewer_launches():
    torch.manual_seed(0)
    config, xp = TunerConfig(), arrays.FewerLaunches()
    betas = torch.tensor(config.betas, dtype=torch.float64)
    state = TunerState(*torch.zeros(len(TunerState._fields), 3, len(config.betas), dtype=torch.float64))
    for number in range(20):
        sums = torch.randn(3, 5, dtype=torch.float64)
        sums[:, 2:] **= 2
        if number % 5 == 3:
            sums[0, 2], sums[1, 0] = float("inf"), float("nan")
        rates = torch.rand(3, dtype=torch.float64)
        expected, found = (update(state, sums, betas, config, module, rates) for module in (torch, xp))
        retained = [delta_retention(state, expected, config, module) for module in (torch, xp)]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert torch.equal(*retained)
        state = expected


def test_arrays_on_the_cpu_are_plain_torch():
    assert arrays.array_module(CPU) is torch
    assert isinstance(arrays.array_module(torch.device("meta")), arrays.FewerLaunches)
