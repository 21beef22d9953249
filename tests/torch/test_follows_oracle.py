"""Mechanic follows Algorithm 1 written in NumPy, on softmax regression over the digits."""

import numpy as np
import pytest
import torch

from mechanic import TunerConfig
from mechanic.torch import Mechanic
from tests.shared import oracle
from tests.torch.oracle_task import BASES, BASES_AND_PATHS, CONFIGS, every_path, run_mechanic, run_oracle
from tests.torch.paths import by_default
from tests.torch.task import scale


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:S is held by a bound")
@pytest.mark.parametrize(
    ("base", "wrap", "config"),
    [
        *((*base_and_path, "default") for base_and_path in BASES_AND_PATHS),
        *(("AdamW", by_default, config) for config in CONFIGS if config != "default"),
    ],
)
def test_float64_follows_for_300_steps(base, wrap, config):
    _, in_torch, options = BASES[base]
    ours, _ = CONFIGS[config]
    expected, got = run_oracle(base, config), run_mechanic(wrap, in_torch, options, ours, torch.float64)
    assert expected[-1][0] > 0
    for (s, x), (our_s, our_x) in zip(expected, got, strict=True):
        assert our_s == pytest.approx(s, rel=1e-9)
        assert np.linalg.norm(our_x - x) <= 1e-9 * np.linalg.norm(x)


@pytest.mark.long
@every_path
def test_float32_tracks_the_scale_for_100_steps(base, wrap):
    _, in_torch, options = BASES[base]
    expected = run_oracle(base)[:100]
    got = run_mechanic(wrap, in_torch, options, TunerConfig(), torch.float32, steps=100)
    for (s, _), (our_s, _) in zip(expected, got, strict=True):
        assert our_s == pytest.approx(s, rel=1e-3)


@pytest.mark.long
def test_a_long_run_at_a_constant_rate_follows():
    """From step 1,000 on, S goes only a part of its way."""
    eigenvalues, start = np.logspace(-2, 0, 12), np.ones(12)
    noise = 0.1 * np.random.default_rng(0).normal(size=(1300, 12))
    reference = oracle.Oracle(oracle.AdamW(lambda t: 1.0, weight_decay=0.0), start)
    param = torch.nn.Parameter(torch.tensor(start))
    optimizer = Mechanic(torch.optim.AdamW([param], lr=1.0, weight_decay=0.0))
    for of_step in noise:
        param.grad = torch.tensor(eigenvalues) * param.detach() + torch.tensor(of_step)
        optimizer.step()
        reference.step(eigenvalues * reference.x + of_step)
        assert scale(optimizer) == pytest.approx(reference.scale, rel=1e-9)


def test_the_learned_rate_is_the_mean_of_s_weighted_with_the_schedule_and_is_handed_over():
    """The last S is not: at the end of a schedule it goes on to change, though nothing tells it how."""
    eigenvalues, start = np.logspace(-2, 0, 12), np.ones(12)
    reference = oracle.Oracle(oracle.AdamW(lambda t: 0.5 + 0.5 * np.cos(np.pi * t / 80), weight_decay=0.0), start)
    param = torch.nn.Parameter(torch.tensor(start))
    optimizer = Mechanic(torch.optim.AdamW([param], lr=0.25, weight_decay=0.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 + 0.5 * np.cos(np.pi * t / 80))
    for _ in range(80):
        param.grad = torch.tensor(eigenvalues) * param.detach()
        optimizer.step()
        scheduler.step()
        reference.step(eigenvalues * reference.x)
        assert optimizer.learned_rates()["default"] == pytest.approx(reference.learned_rate, rel=1e-9)
    assert abs(reference.learned_rate / reference.scale - 1) > 0.1
    optimizer.freeze()
    assert scale(optimizer) == pytest.approx(reference.learned_rate, rel=1e-9)
    assert optimizer.release().param_groups[0]["initial_lr"] == pytest.approx(reference.learned_rate, rel=1e-9)


@pytest.mark.filterwarnings("ignore:S is held by a bound")
@pytest.mark.parametrize(("bound", "factor"), [("max_lr", 0.1), ("max_lr", 0.5), ("min_lr", 3.0)])
def test_a_run_that_goes_on_with_other_bounds_follows_and_goes_on_from_where_it_is(bound, factor):
    eigenvalues, start = np.logspace(-2, 0, 12), np.ones(12)
    reference = oracle.Oracle(oracle.AdamW(lambda t: 1.0, weight_decay=0.0), start)
    param = torch.nn.Parameter(torch.tensor(start))
    optimizer = Mechanic(torch.optim.AdamW([param], lr=1.0, weight_decay=0.0))
    for step in range(90):
        if step == 60:
            saved, limit = optimizer.state_dict(), factor * scale(optimizer)
            reference.bounds = (limit, np.inf) if bound == "min_lr" else (0.0, limit)
            optimizer = Mechanic(torch.optim.AdamW([param], lr=1.0, weight_decay=0.0), config={bound: limit})
            optimizer.load_state_dict(saved)
        before = param.detach().clone()
        param.grad = torch.tensor(eigenvalues) * before
        optimizer.step()
        reference.step(eigenvalues * reference.x)
        assert scale(optimizer) == pytest.approx(reference.scale, rel=1e-9)
        np.testing.assert_allclose(param.detach(), reference.x, rtol=1e-9, atol=1e-12)
        if step == 60:  # S is at its bound, and the parameters made one step of AdamW
            assert scale(optimizer) == pytest.approx(limit, rel=0.1)
            assert (param - before).abs().max() <= 1.5 * scale(optimizer)
