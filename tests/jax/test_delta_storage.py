"""``mechanize(base, delta=...)``: what is kept, what a step does, and that it goes on from any storage.

test_resume.py resumes such runs, test_transformations.py has them inside others, and sharded.py on shards.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import freeze, mechanize, nonfinite_steps, release, scale, scales
from mechanic.jax.state import find
from mechanic.jax.storage import decode, scales_shape
from tests.jax.task import (
    LABELS,
    PLAIN,
    avals,
    batch,
    gradient_of,
    learned,
    mlp,
    mover,
    same_bits,
    stepper,
    train,
    train_loss,
)

rounded = pytest.mark.parametrize("delta", ["bfloat16", "int8"])
GAP = {"bfloat16": 2**-7, "int8": 2 / 127}  # at most, relative to the largest element of a block
BYTES = {"bfloat16": 2, "int8": 1}


def delta_of(state, name, dtype=jnp.float32):
    """Decoded."""
    (state,) = find(state)
    of_blocks = None if state.delta_scales is None else state.delta_scales[name]
    return np.asarray(decode(state.delta[name], of_blocks, dtype))


@functools.cache
def wrapped(delta):
    return mechanize(optax.sgd(1.0), delta=delta)


def trained(delta):
    return learned(wrapped(delta), steps=10)


@pytest.mark.parametrize("delta", [jnp.float16, jnp.float64, "int4", jnp.uint8, 8, "small", [jnp.float32]])
def test_other_storages_are_refused(delta):
    with pytest.raises(ValueError, match=r"delta must be .* or 'int8', got"):
        mechanize(optax.sgd(1.0), delta=delta)


@pytest.mark.long
def test_a_storage_is_named_by_a_dtype_or_its_name():
    for given in (jnp.bfloat16, "bfloat16", jnp.dtype(jnp.bfloat16)):
        assert mechanize(optax.sgd(1.0), delta=given).init(jnp.ones(3)).delta.dtype == jnp.bfloat16
    for given in ("int8", jnp.int8):
        assert mechanize(optax.sgd(1.0), delta=given).init(jnp.ones(3)).delta.dtype == jnp.int8


@pytest.mark.long
def test_float32_is_the_default_bit_for_bit():
    assert same_bits(trained(None), trained(jnp.float32))


@pytest.mark.long
@rounded
def test_what_is_kept(delta):
    params, state = trained(delta)
    for name, p in params.items():
        assert state.delta[name].dtype == delta
        assert state.delta[name].shape == p.shape
        assert state.delta[name].any()
        if delta == "int8":
            assert state.delta_scales[name].shape == scales_shape(p.shape)
            assert state.delta_scales[name].dtype == jnp.float32
    assert (state.delta_scales is None) == (delta != "int8")
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves((state.delta, state.delta_scales)))
    assert kept <= 1.05 * BYTES[delta] * sum(p.size for p in params.values())
    assert same_bits(jax.jit(wrapped(delta).init)(params), wrapped(delta).init(params))


@functools.cache
def long_run(delta):
    """Of a tuner for each of two parts, to a learning rate of 0; compiled once and with donated buffers."""
    schedule = optax.cosine_decay_schedule(1.0, 200)
    optimizer = mechanize(optax.adamw(schedule), schedule=schedule, labels=LABELS, delta=delta)
    step, params = stepper(optimizer, donate_argnums=(0, 1)), mlp()
    state = optimizer.init(params)
    given = jax.tree.leaves((params, state))
    params, state = train(params, optimizer, 200, state=state, step=step)
    assert step._cache_size() == 1
    assert all(buffer.is_deleted() for buffer in given)
    return params, state, optimizer


@pytest.mark.long
@rounded
def test_training_comes_as_far_and_ends_where_the_learning_rate_does(delta):
    (params, state, optimizer), (expected, wide, _) = long_run(delta), long_run(None)
    assert train_loss(params) <= 1.3 * train_loss(expected)
    assert scales(state)["a"] != scales(state)["b"]
    for name, s in scales(wide).items():
        assert scales(state)[name] == pytest.approx(float(s), rel=0.3)
    given = jax.tree.map(jnp.copy, (params, state))
    moved, _ = train(given[0], optimizer, 1, state=given[1], step=stepper(optimizer, donate_argnums=(0, 1)))
    assert same_bits(moved, params)


@pytest.mark.long
@rounded
def test_parameters_move_by_the_delta_that_is_not_yet_rounded_and_it_is_stored_within_a_gap(delta):
    """In float64, and nothing is forgotten, so that a difference of Deltas is the update."""
    with jax.enable_x64(True):
        optimizer, params = mechanize(optax.sgd(1.0), delta=delta, config={"forgetting": 0.0}), mlp(4, jnp.float64)
        step, state = mover(optimizer), optimizer.init(params)
        for t in range(10):
            params, state = step(gradient_of(params, *batch(t)), state, params)
        grads = {**gradient_of(params, *batch(10)), "last": jnp.zeros_like(params["last"])}
        moved, after = step(grads, state, params)
        s, new_s = float(scale(state)), float(scale(after))
        assert s != new_s
        for name, x in params.items():
            d, new_d = (delta_of(each, name, jnp.float64) for each in (state, after))
            expected = d - np.asarray(grads[name])
            np.testing.assert_allclose(moved[name], x + new_s * expected - s * d, rtol=0, atol=1e-12)
            assert np.abs(new_d - expected).max() <= GAP[delta] * np.abs(expected).max()
            assert np.array_equal(new_d, expected) == (name == "last")  # which had no update
        moved, after = step(jax.tree.map(lambda g: g * jnp.nan, grads), state, params)
        assert nonfinite_steps(after) == {"default": 1}
        assert same_bits((after.delta, after.delta_scales), (state.delta, state.delta_scales))
        assert same_bits(moved, params)


@pytest.mark.long
@rounded
def test_x_minus_s_delta_stays_where_it_was_in_the_mean(delta):
    """Every step moves it by S times what rounding has added, which has mean 0 and does not grow."""
    with jax.enable_x64(True):
        optimizer = mechanize(optax.adam(1.0), delta=delta)
        start = mlp(hidden=256, dtype=jnp.float64)
        params, state = train(start, optimizer, 60)
        moved, gaps = [], []
        for name, x in start.items():
            d = delta_of(state, name, jnp.float64)
            moved.append(np.ravel(params[name] - scale(state) * d - x))
            gaps.append(np.full(x.size, scale(state) * GAP[delta] * np.abs(d).max()))
    moved, gaps = np.concatenate(moved), np.concatenate(gaps)
    assert np.abs(moved).max() > 0
    assert abs(moved.mean()) <= 4 * moved.std() / len(moved) ** 0.5
    assert (np.abs(moved) <= 60**0.5 * 4 * gaps).all()


# Parameters of all kinds.


@pytest.mark.long
@rounded
def test_every_kind_of_parameter(delta):
    rng = np.random.default_rng(0)
    shapes = [(), (0, 3), (1,), (5, 257), (2, 3, 4, 5)]
    with jax.enable_x64(True):
        params = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
        params += [jnp.asarray(rng.normal(size=40)), jnp.asarray(rng.normal(size=9), jnp.complex64)]
        params += [jnp.asarray(rng.normal(size=30), jnp.bfloat16)]
        start, state = params, jax.jit(wrapped(delta).init)(params)

        @jax.jit
        def step(params, state):
            return mover(wrapped(delta))([p - jnp.asarray(0.5, p.dtype) for p in params], state, params)

        for _ in range(30):
            params, state = step(params, state)
    for p, x, d in zip(params, start, state.delta, strict=True):
        assert d.dtype == ("complex64" if jnp.iscomplexobj(p) else delta)
        before, after = (np.abs(np.asarray(each).astype(complex) - 0.5).sum() for each in (x, p))
        assert after < before or not p.size


@functools.cache
def end_in_half_precision(delta):
    params, state = train(mlp(8, jnp.bfloat16), mechanize(optax.adamw(1.0), delta=delta), 200)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state.residual))
    return train_loss(params)


@pytest.mark.long
@rounded
def test_half_precision_parameters_end_where_they_do_with_float32(delta):
    assert end_in_half_precision(delta) == pytest.approx(end_in_half_precision(None), rel=0.3, abs=0.01)


# Going on.


@pytest.mark.long
@pytest.mark.parametrize(("before", "delta"), [(None, "int8"), ("int8", "bfloat16"), ("bfloat16", "float32")])
def test_a_state_goes_on_in_every_storage(before, delta):
    """The first step stores it as the optimizer has it, from the values that it had."""
    params, state = trained(before)
    expected, _ = train(params, wrapped(before), 1, state=state, first=10)
    moved, after = train(params, wrapped(delta), 1, state=state, first=10)
    for name, p in moved.items():
        np.testing.assert_allclose(p, expected[name], rtol=1e-5, atol=1e-6)  # rounding comes after
        assert after.delta[name].dtype == delta
    assert (after.delta_scales is None) == (delta != "int8")
    assert train_loss(train(moved, wrapped(delta), 60, state=after, first=11)[0]) < train_loss(moved)


@pytest.mark.long
def test_codes_without_their_scales_are_refused():
    params = mlp(hidden=4)
    state = wrapped("int8").init(params)
    for spoilt in (None, {**state.delta_scales, "last": state.delta_scales["last"][:0]}):
        with pytest.raises(ValueError, match="scales"):
            wrapped("int8").update(params, state._replace(delta_scales=spoilt), params)


@pytest.mark.long
@rounded
def test_freezing_and_releasing_drop_all_of_it(delta):
    """Then nothing tells the state from one whose Delta was in float32, and test_freezing.py has what comes next."""
    _, state = trained(delta)
    _, wide = learned(PLAIN, steps=10)
    frozen = freeze(state)
    assert frozen.delta is frozen.delta_scales is None
    assert avals(frozen) == avals(freeze(wide))
    assert scales(frozen) == scales(state)
    assert same_bits(release(optax.sgd(1.0), state)[1][0], state.base)
