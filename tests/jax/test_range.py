"""How large gradients may be without x64: as large as in mechanic.torch, whose tuner is in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from mechanic.jax import mechanize, nonfinite_steps, scale
from mechanic.torch import Mechanic
from tests.jax.task import PLAIN, mover

TOO_LARGE = 3e19  # its square leaves float32
LARGEST = 1e19


def house_prices():
    """Areas in square feet and prices in dollars: nothing is normalised."""
    rows = np.random.default_rng(0).uniform(500, 3000, (64, 3)).astype(np.float32)
    return rows, rows @ np.asarray([200.0, 50.0, 100.0], np.float32)


def torch_losses_on_house_prices(steps):
    rows, prices = (torch.from_numpy(array) for array in house_prices())
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer, losses = Mechanic(torch.optim.SGD([weights], lr=1.0)), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ((rows @ weights - prices) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.asarray(losses)


def is_finite(state):
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]).all()


@functools.partial(jax.jit, static_argnums=(0, 2))
def descend(loss, x, steps, factor=1.0):
    """Under SGD, with gradients of ``factor`` times the loss. Returns every loss, and the state after the last step."""

    def step(carry, _):
        x, state = carry
        value, grads = jax.value_and_grad(loss)(x)
        updates, state = PLAIN.update(factor * grads, state, x)
        return (optax.apply_updates(x, updates), state), value

    (x, state), losses = jax.lax.scan(step, (x, PLAIN.init(x)), length=steps)
    return jnp.append(losses, loss(x)), state


@pytest.mark.long
def test_unnormalised_house_prices_are_learned_from_on_every_step_as_in_torch():
    """Gradients of 4e9, feedback of 1e20: its square would not fit in a float32."""
    rows, prices = house_prices()
    ours, state = descend(lambda w: jnp.mean((rows @ w - prices) ** 2), jnp.ones(3), 2000)
    assert (state.tuner.steps == 2000).all()
    assert (state.tuner.nonfinite_steps == 0).all()
    assert (state.tuner.largest_feedback**2 == jnp.inf).any()
    # Later both are at the edge of float32.
    np.testing.assert_allclose(ours[:300], torch_losses_on_house_prices(300), rtol=2e-2)
    assert min(ours) < 1e-11 * ours[0]
    assert ours[-1] < 1e-4 * ours[0]


def on_quadratic(factor):
    """14 parameters. Returns the loss at the end over that at the start, and the state."""
    losses, state = descend(quadratic, jnp.zeros(14), 300, factor)
    assert is_finite(state)
    return losses[-1] / losses[0], state


def quadratic(x):
    target = 2 * jnp.asarray(np.random.default_rng(0).normal(size=14), jnp.float32)
    return jnp.sum(jnp.linspace(0.1, 1, 14) * (x - target) ** 2)


@pytest.mark.long
@pytest.mark.parametrize("factor", [1e8, 1e9, 1e12, 1e17])
def test_sgd_learns_the_same_whatever_the_gradients_are_multiplied_by(factor):
    plain_loss, plain = on_quadratic(1.0)
    loss, state = on_quadratic(factor)
    assert (state.tuner.steps == 300).all()
    assert factor * float(scale(state)) == pytest.approx(float(scale(plain)), rel=1e-2)
    assert plain_loss < 1e-6
    assert loss == pytest.approx(float(plain_loss), rel=0.1)


def test_a_multiple_that_takes_delta_out_of_range_is_counted():
    loss, state = on_quadratic(3e18)
    assert loss > 0.9
    assert nonfinite_steps(state)["default"] > 200


def scales_in_jax(base, norm, steps):
    """S after every step with a gradient of this norm."""
    optimizer, x = mechanize({"Adam": optax.adam, "SGD": optax.sgd}[base](1.0)), jnp.ones(4)
    state, course = optimizer.init(x), []
    for _ in range(steps):
        x, state = mover(optimizer)(jnp.full(4, norm / 2), state, x)
        course.append(float(scale(state)))
    assert is_finite((x, state))
    return course


def scales_in_torch(base, norm, steps):
    x = torch.nn.Parameter(torch.ones(4))
    optimizer, course = Mechanic(getattr(torch.optim, base)([x], lr=1.0)), []
    for _ in range(steps):
        x.grad = torch.full((4,), norm / 2)
        optimizer.step()
        course.append(optimizer.scales()["default"])
    assert x.isfinite().all()
    return course


in_both_backends = pytest.mark.parametrize("scales_in", [scales_in_jax, scales_in_torch])


@pytest.mark.long
@in_both_backends
def test_gradients_count_up_to_the_norm_whose_square_leaves_float32(scales_in):
    learned = scales_in("Adam", LARGEST, 4)
    assert 0 < learned[-2] < learned[-1]
    assert scales_in("Adam", TOO_LARGE, 4) == [0.0] * 4


@pytest.mark.long
@in_both_backends
@pytest.mark.filterwarnings("ignore:10 of 15 steps so far")  # torch's, and right: nothing is learned from then on
def test_under_sgd_delta_is_a_sum_of_gradients_and_has_the_same_bound(scales_in):
    """It passes it within ten steps, and from then on the scale stays as it was."""
    course = scales_in("SGD", 5e18, 30)
    assert course[2] > 0
    assert len(set(course[10:])) == 1


@pytest.mark.long
def test_feedback_that_adds_up_to_more_than_float32_holds_is_left_out_and_counted():
    """|Delta| is 1.5e19 and |g| 1e18, so each step is in range, but not what 1000 of them add up to."""
    optimizer, x, t = mechanize(optax.sgd(1.0), config={"forgetting": 0.0}), jnp.ones(4), jnp.arange(1000)

    def step(state, sign):
        _, state = optimizer.update(jnp.full(4, sign * 5e17), state, x)
        return state, is_finite(state)

    signs = jnp.where((t < 15) | (t % 2 == 1), 1.0, -1.0)
    state, finite = jax.jit(lambda: jax.lax.scan(step, optimizer.init(x), signs))()
    assert finite.all()
    assert scale(state) > 0
    assert (state.tuner.nonfinite_steps > 0).all()
    assert (state.tuner.nonfinite_steps + state.tuner.steps == 1000).all()
