"""diffusers' training loop around a small UNet."""

import pytest
import torch

pytest.importorskip("diffusers", reason="has an environment of its own: make test-ecosystem")
import diffusion
from mechanic.torch import Mechanic


def test_a_unet_ends_near_a_learning_rate_that_was_searched_for():
    learned, optimizer, average = diffusion.train(lambda params: Mechanic(torch.optim.AdamW(params, lr=1.0)))
    best, _, _ = diffusion.train(lambda params: torch.optim.AdamW(params, lr=1e-2))
    assert learned < 1.2 * best
    assert 1e-4 < optimizer.scales()["default"] < 1e-1
    assert average.optimization_step == diffusion.STEPS
