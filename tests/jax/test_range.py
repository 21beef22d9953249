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

TOO_LARGE = 3e19  # its square leaves float32
LARGEST = 1e19


def house_prices():
    """Areas in square feet and prices in dollars: nothing is normalised."""
    rows = np.random.default_rng(0).uniform(500, 3000, (64, 3)).astype(np.float32)
    return rows, rows @ np.asarray([200.0, 50.0, 100.0], np.float32)


def jax_losses_on_house_prices(steps):
    """Returns the loss before every step, and the state after the last."""
    rows, prices = (jnp.asarray(array) for array in house_prices())
    optimizer, weights = mechanize(optax.sgd(1.0)), jnp.ones(3)

    @jax.jit
    def step(weights, state):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((rows @ w - prices) ** 2))(weights)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    state, losses = optimizer.init(weights), []
    for _ in range(steps):
        weights, state, loss = step(weights, state)
        losses.append(loss)
    return np.asarray(losses), state


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
    return all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_unnormalised_house_prices_are_learned_from_on_every_step_as_in_torch():
    """Gradients of 4e9, feedback of 1e20: its square would not fit in a float32."""
    (ours, state), theirs = jax_losses_on_house_prices(2000), torch_losses_on_house_prices(2000)
    assert (state.tuner.steps == 2000).all()
    assert (state.tuner.nonfinite_steps == 0).all()
    assert (state.tuner.largest_feedback**2 == jnp.inf).any()
    np.testing.assert_allclose(ours[:300], theirs[:300], rtol=2e-2)  # later both are at the edge of float32
    assert min(ours) < 1e-11 * ours[0]
    assert min(theirs) < 1e-11 * theirs[0]
    assert ours[-1] < 1e-4 * ours[0]


@functools.cache
def run_on_quadratic(factor, steps=300):
    """14 parameters. Returns the loss at the end over that at the start, and the state."""
    target, eigenvalues = (
        2 * jnp.asarray(np.random.default_rng(0).normal(size=14), jnp.float32),
        jnp.linspace(0.1, 1, 14),
    )
    optimizer, x = mechanize(optax.sgd(1.0)), jnp.zeros(14)

    def loss_of(x):
        return jnp.sum(eigenvalues * (x - target) ** 2)

    @jax.jit
    def step(x, state):
        updates, state = optimizer.update(factor * jax.grad(loss_of)(x), state, x)
        return optax.apply_updates(x, updates), state

    state, start = optimizer.init(x), loss_of(x)
    for _ in range(steps):
        x, state = step(x, state)
    return loss_of(x) / start, state


@pytest.mark.parametrize("factor", [1e8, 1e9, 1e12, 1e17])
def test_sgd_learns_the_same_whatever_the_gradients_are_multiplied_by(factor):
    plain_loss, plain = run_on_quadratic(1.0)
    loss, state = run_on_quadratic(factor)
    assert (state.tuner.steps == 300).all()
    assert is_finite(state)
    assert factor * float(scale(state)) == pytest.approx(float(scale(plain)), rel=1e-2)
    assert plain_loss < 1e-6
    assert loss == pytest.approx(float(plain_loss), rel=0.1)


def test_a_multiple_that_takes_delta_out_of_range_is_counted():
    loss, state = run_on_quadratic(3e18)
    assert loss > 0.9
    assert nonfinite_steps(state)["default"] > 200
    assert is_finite(state)


def scales_in_jax(base, gradients):
    """S after every step with a given gradient."""
    optimizer, x = mechanize(base), jnp.ones(4)
    state, step, course = optimizer.init(x), jax.jit(optimizer.update), []
    for gradient in gradients:
        updates, state = step(jnp.asarray(gradient, jnp.float32), state, x)
        x = optax.apply_updates(x, updates)
        course.append(float(scale(state)))
    assert jnp.isfinite(x).all()
    assert is_finite(state)
    return course


def scales_in_torch(base, gradients):
    x = torch.nn.Parameter(torch.ones(4))
    optimizer, course = Mechanic(base([x], lr=1.0)), []
    for gradient in gradients:
        x.grad = torch.as_tensor(gradient, dtype=torch.float32)
        optimizer.step()
        course.append(optimizer.scales()["default"])
    assert x.isfinite().all()
    return course


RUNS = {
    "jax": lambda base, gradients: scales_in_jax({"Adam": optax.adam, "SGD": optax.sgd}[base](1.0), gradients),
    "torch": lambda base, gradients: scales_in_torch(getattr(torch.optim, base), gradients),
}
in_both_backends = pytest.mark.parametrize("backend", RUNS)


def gradients_of_norm(norm, steps):
    return [np.full(4, norm / 2)] * steps


@in_both_backends
def test_gradients_count_up_to_the_norm_whose_square_leaves_float32(backend):
    learned = RUNS[backend]("Adam", gradients_of_norm(LARGEST, 4))
    assert 0 < learned[-2] < learned[-1]
    assert RUNS[backend]("Adam", gradients_of_norm(TOO_LARGE, 4)) == [0.0] * 4


@in_both_backends
@pytest.mark.filterwarnings("ignore:10 of 15 steps so far")  # torch's, and right: nothing is learned from then on
def test_under_sgd_delta_is_a_sum_of_gradients_and_has_the_same_bound(backend):
    """It passes it within ten steps, and from then on the scale stays as it was."""
    course = RUNS[backend]("SGD", gradients_of_norm(5e18, 30))
    assert course[2] > 0
    assert len(set(course[10:])) == 1


def test_feedback_that_adds_up_to_more_than_float32_holds_is_left_out_and_counted():
    """|Delta| is 1.5e19 and |g| 1e18, so each step is in range, but not what 1000 of them add up to."""
    optimizer, x = mechanize(optax.sgd(1.0), config={"forgetting": 0.0}), jnp.ones(4)
    state, step = optimizer.init(x), jax.jit(optimizer.update)
    for t in range(1000):
        sign = 1 if t < 15 or t % 2 else -1
        _, state = step(jnp.full(4, sign * 5e17), state, x)
        assert is_finite(state), t
    assert scale(state) > 0
    assert (state.tuner.nonfinite_steps > 0).all()
    assert (state.tuner.nonfinite_steps + state.tuner.steps == 1000).all()
