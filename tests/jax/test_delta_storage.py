"""``mechanize(base, delta=...)``: what is kept, what a step does, and that it goes on from anywhere."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mechanic.jax import freeze, mechanize, nonfinite_steps, release, scale, scales
from mechanic.jax.state import find
from mechanic.jax.storage import decode, scales_shape
from tests.jax.task import AROUND, batch, gradient_of, mlp, same_bits, stepper, train, train_loss
from tests.jax.test_resume import WAYS, check_resumes

ROOT = Path(__file__).parents[2]
rounded = pytest.mark.parametrize("delta", ["bfloat16", "int8"])
GAP = {"bfloat16": 2**-7, "int8": 2 / 127}  # at most, relative to the largest element of a block
BYTES = {"bfloat16": 2, "int8": 1}
LABELS = {"first": "a", "last": "b"}


def delta_of(state, name, dtype=jnp.float32):
    """Decoded."""
    (state,) = find(state)
    of_blocks = None if state.delta_scales is None else state.delta_scales[name]
    return np.asarray(decode(state.delta[name], of_blocks, dtype))


def trained(delta, base=optax.adamw, steps=10, dtype=jnp.float32, hidden=8, **options):
    optimizer = mechanize(base(1.0), delta=delta, **options)
    return optimizer, *train(mlp(hidden=hidden, dtype=dtype), optimizer, steps)


@pytest.mark.parametrize("delta", [jnp.float16, jnp.float64, "int4", jnp.uint8, 8, "small", [jnp.float32]])
def test_other_storages_are_refused(delta):
    with pytest.raises(ValueError, match=r"delta must be .* or 'int8', got"):
        mechanize(optax.sgd(1.0), delta=delta)


def test_a_storage_is_named_by_a_dtype_or_its_name():
    for given in (jnp.bfloat16, "bfloat16", jnp.dtype(jnp.bfloat16)):
        assert mechanize(optax.sgd(1.0), delta=given).init(jnp.ones(3)).delta.dtype == jnp.bfloat16
    for given in ("int8", jnp.int8):
        assert mechanize(optax.sgd(1.0), delta=given).init(jnp.ones(3)).delta.dtype == jnp.int8


def test_float32_is_the_default_bit_for_bit():
    assert same_bits(trained(None)[1:], trained(jnp.float32)[1:])


@rounded
def test_what_is_kept(delta):
    optimizer, params, state = trained(delta, hidden=64)
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
    assert same_bits(jax.jit(optimizer.init)(params), optimizer.init(params))


@rounded
@pytest.mark.parametrize("base", [optax.adamw, optax.sgd])
def test_training_comes_as_far(delta, base):
    losses = {}
    for chosen in (None, delta):
        schedule = optax.cosine_decay_schedule(1.0, 200)
        optimizer = mechanize(base(schedule), schedule=schedule, delta=chosen)
        losses[chosen] = train_loss(train(mlp(), optimizer, 200)[0])
    assert losses[delta] <= 1.3 * losses[None]


# One step.


def one_step_of_sgd(delta):
    """The next step from a trained state, in float64: S, Delta, values before and after, and u."""
    with jax.enable_x64(True):
        optimizer, params, state = trained(delta, optax.sgd, dtype=jnp.float64, config={"forgetting": 0.0})
        grads = {**gradient_of(params, *batch(10)), "last": jnp.zeros_like(params["last"])}
        updates, after = jax.jit(optimizer.update)(grads, state, params)
        moved = optax.apply_updates(params, updates)
        deltas = [{name: delta_of(each, name, jnp.float64) for name in params} for each in (state, after)]
        u, params, moved = jax.tree.map(np.asarray, (jax.tree.map(jnp.negative, grads), params, moved))
        return (float(scale(state)), deltas[0], params), (float(scale(after)), deltas[1], moved), u


@rounded
def test_parameters_move_by_the_delta_that_is_not_yet_rounded(delta):
    (s, deltas, values), (new_s, _, new_values), u = one_step_of_sgd(delta)
    assert s != new_s
    for name, x in values.items():
        expected = x + new_s * (deltas[name] + u[name]) - s * deltas[name]
        np.testing.assert_allclose(new_values[name], expected, rtol=0, atol=1e-12)


@rounded
def test_delta_is_within_a_gap_of_what_it_should_be(delta):
    (_, deltas, _), (_, new_deltas, _), u = one_step_of_sgd(delta)
    for name, d in deltas.items():
        expected = d + u[name]
        assert np.abs(new_deltas[name] - expected).max() <= GAP[delta] * np.abs(expected).max()
        assert np.array_equal(new_deltas[name], expected) == (name == "last")  # which had no update


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


@rounded
def test_a_step_at_lr_0_moves_no_parameter(delta):
    schedule = optax.linear_schedule(1.0, 0.0, 16)
    optimizer = mechanize(optax.adamw(schedule), schedule=schedule, delta=delta)
    params, state = train(mlp(hidden=4), optimizer, 16)
    assert same_bits(train(params, optimizer, 1, state=state)[0], params)


@rounded
def test_it_compiles_once_and_takes_donated_buffers(delta):
    optimizer, params = mechanize(optax.adamw(1.0), delta=delta, labels=LABELS), mlp()
    state = optimizer.init(params)
    given = jax.tree.leaves((params, state))
    step = stepper(optimizer, donate_argnums=(0, 1))
    params, state = train(params, optimizer, 60, state=state, step=step)
    assert step._cache_size() == 1
    assert all(buffer.is_deleted() for buffer in given)
    assert train_loss(params) < 1.5


# Parameters of all kinds.


@rounded
def test_every_kind_of_parameter(delta):
    rng = np.random.default_rng(0)
    shapes = [(), (0, 3), (1,), (5, 257), (2, 3, 4, 5)]
    with jax.enable_x64(True):
        params = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
        params += [jnp.asarray(rng.normal(size=40)), jnp.asarray(rng.normal(size=9), jnp.complex64)]
        params += [jnp.asarray(rng.normal(size=30), jnp.bfloat16)]
        start, optimizer = params, mechanize(optax.adamw(1.0, weight_decay=0.1), delta=delta)
        state, step = optimizer.init(params), jax.jit(optimizer.update)
        for _ in range(30):
            updates, state = step([p - jnp.asarray(0.5, p.dtype) for p in params], state, params)
            params = optax.apply_updates(params, updates)
    for p, x, d in zip(params, start, state.delta, strict=True):
        assert d.dtype == ("complex64" if jnp.iscomplexobj(p) else delta)
        before, after = (np.abs(np.asarray(each).astype(complex) - 0.5).sum() for each in (x, p))
        assert after < before or not p.size


@rounded
def test_half_precision_parameters_end_where_they_do_with_float32(delta):
    ends = {}
    for chosen in (None, delta):
        _, params, state = trained(chosen, steps=200, dtype=jnp.bfloat16)
        ends[chosen] = train_loss(params)
        assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state.residual))
    assert ends[delta] == pytest.approx(ends[None], rel=0.3, abs=0.01)


# Going on.


@pytest.mark.parametrize(("delta", "way"), [("bfloat16", "orbax"), *(("int8", way) for way in (*WAYS, "deepcopy"))])
def test_a_copy_goes_on_bit_for_bit(delta, way, tmp_path, monkeypatch):
    monkeypatch.setitem(WAYS, "deepcopy", lambda run, folder: copy.deepcopy(run))

    def make():
        return optax.chain(optax.clip_by_global_norm(1.0), mechanize(optax.adamw(1.0), delta=delta))

    check_resumes(make, train(mlp(hidden=4), make(), 12), way, tmp_path)


@pytest.mark.parametrize(
    ("before", "delta"), [(None, "int8"), ("int8", "float32"), ("int8", "bfloat16"), ("bfloat16", "int8")]
)
def test_a_state_goes_on_in_every_storage(before, delta):
    """The first step stores it as the optimizer has it, from the values that it had."""
    _, params, state = trained(before)
    optimizer = mechanize(optax.adamw(1.0), delta=delta)
    expected, _ = train(params, mechanize(optax.adamw(1.0), delta=before), 1, state=state, first=10)
    moved, after = train(params, optimizer, 1, state=state, first=10)
    for name, p in moved.items():
        np.testing.assert_allclose(p, expected[name], rtol=1e-5, atol=1e-6)  # rounding comes after
        assert after.delta[name].dtype == delta
    assert (after.delta_scales is None) == (delta != "int8")
    assert train_loss(train(moved, optimizer, 60, state=after, first=11)[0]) < train_loss(moved)


def test_codes_without_their_scales_are_refused():
    optimizer, params, state = trained("int8")
    for spoilt in (None, {**state.delta_scales, "last": state.delta_scales["last"][:0]}):
        with pytest.raises(ValueError, match="scales"):
            optimizer.update(params, state._replace(delta_scales=spoilt), params)


def test_the_layout_of_codes_and_scales_follows_from_that_of_the_parameters():
    optimizer, names = mechanize(optax.adamw(1.0), delta="int8"), {"first": "rows", "last": "all"}
    layout = optax.tree.map_params(optimizer, lambda _, name: name, optimizer.init(mlp()), names)
    assert layout.delta == layout.delta_scales == names


# All else that may happen to it.


@pytest.mark.parametrize("around", AROUND)
def test_it_works_inside_other_transformations(around):
    optimizer = AROUND[around](mechanize(optax.adamw(1.0), delta="int8"))
    params, state = train(mlp(hidden=4), optimizer, 30)
    assert find(state)[0].delta["first"].dtype == jnp.int8
    assert scale(state) > 0
    assert train_loss(params) < train_loss(mlp(hidden=4))


@rounded
def test_tuners_learn_apart(delta):
    _, params, state = trained(delta, labels=LABELS, steps=60)
    _, expected, wide = trained(None, labels=LABELS, steps=60)
    assert scales(state)["a"] != scales(state)["b"]
    for name, s in scales(wide).items():
        assert scales(state)[name] == pytest.approx(float(s), rel=0.3)
    assert train_loss(params) <= 1.3 * train_loss(expected)


@rounded
def test_observed_and_bad_gradients(delta):
    optimizer, params, state = trained(delta, optax.sgd, config={"forgetting": 0.0})
    grads, held_out = gradient_of(params, *batch(30)), gradient_of(params, *batch(31))
    observing = jax.jit(lambda *given: optimizer.update(*given[:3], observed=given[3]))
    _, expected = jax.jit(optimizer.update)(held_out, state, params)
    _, after = observing(grads, state, params, held_out)
    assert scale(after) == scale(expected) != scale(state)
    assert not same_bits(after.delta, expected.delta)
    broken = jax.tree.map(lambda g: g * jnp.nan, grads)
    updates, after = jax.jit(optimizer.update)(broken, state, params)
    assert nonfinite_steps(after) == {"default": 1}
    assert same_bits((after.delta, after.delta_scales), (state.delta, state.delta_scales))
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))


@rounded
def test_freezing_and_releasing_drop_all_of_it(delta):
    optimizer, params, state = trained(delta, optax.adam, steps=40)
    frozen = freeze(state)
    assert frozen.delta is frozen.delta_scales is None
    assert scales(frozen) == scales(state)
    plain, plain_state = release(optax.adam(1.0), state)
    ends = [train(params, optimizer, 10, state=frozen)[0], train(params, plain, 10, state=plain_state)[0]]
    for name in params:
        np.testing.assert_allclose(*(each[name] for each in ends), rtol=1e-5, atol=1e-6)
    assert train_loss(ends[0]) < train_loss(params)


def test_shards_give_the_result_of_one_device():
    """In a process of its own, with eight devices that the host is made to show."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.jax.sharded_storage"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        timeout=480,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
