"""Muon and AdamW under Mechanic take the same steps in PyTorch and in JAX, where the rule of Muon is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from mechanic.jax import mechanize, muon, scale
from mechanic.torch import MechanicMuon
from tests.torch.muon_parallel import exact

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
SHAPES = {"wide": (6, 9), "tall": (8, 3), "bias": (5,)}


def gradient(name, values, step):
    return np.cos(values + step + len(name)) + 0.3 * values


def both(steps, *, nesterov):
    """The parameters and S after some steps, of each."""
    rng = np.random.default_rng(0)
    start = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    model = torch.nn.Module()
    for name, values in start.items():
        model.register_parameter(name, torch.nn.Parameter(torch.tensor(values)))
    given = {"wide": "matrix", "tall": "matrix", "bias": "vector"}
    optimizer = MechanicMuon(model, nesterov=nesterov, roles=given)
    with exact():
        for step in range(steps):
            for name, p in model.named_parameters():
                p.grad = torch.tensor(gradient(name, p.detach().numpy(), step))
            optimizer.step()
    ours = {name: p.detach().numpy() for name, p in model.named_parameters()}, optimizer.scales()["default"]
    with jax.enable_x64(True):
        transformation = mechanize(muon(1.0, nesterov=nesterov))
        params = jax.tree.map(jnp.asarray, start)
        state = transformation.init(params)
        for step in range(steps):
            grads = {name: jnp.asarray(gradient(name, np.asarray(p), step)) for name, p in params.items()}
            updates, state = transformation.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return ours, ({name: np.asarray(p) for name, p in params.items()}, float(scale(state)))


@pytest.mark.long
def test_without_nesterov_they_take_the_same_steps():
    (ours, our_scale), (theirs, their_scale) = both(12, nesterov=False)
    assert our_scale == pytest.approx(their_scale, rel=1e-5)
    assert our_scale > 0
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_with_nesterov_they_stay_near_each_other():
    """Optax corrects the bias of momentum and gradient apart, torch does not: the first updates differ a little."""
    (ours, our_scale), (theirs, their_scale) = both(12, nesterov=True)
    assert our_scale == pytest.approx(their_scale, rel=0.1)
    moved = np.concatenate([(ours[name] - theirs[name]).ravel() for name in SHAPES])
    assert 0 < np.abs(moved).max() < 0.1
