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
