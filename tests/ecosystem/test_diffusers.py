"""diffusers' training loop around a small UNet."""

import pytest

pytest.importorskip("diffusers", reason="has an environment of its own: make test-ecosystem")
import diffusion


def test_a_unet_ends_near_the_better_of_two_learning_rates():
    learned, best = diffusion.compare()
    assert learned < 1.2 * best
