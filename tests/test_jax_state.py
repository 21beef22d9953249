"""Reading the scale, labels, bad numbers, observed gradients, freezing and releasing, refusals."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from benchmarks import jax_step
from jax_task import batch, loss_of, mlp, same_bits, stepper, train, train_loss
from mechanic import TunerConfig
from mechanic.jax import freeze, mechanize, release, scale, scales
from mechanic.tuner import TunerState

gradient_of = jax.jit(jax.grad(loss_of))
PLAIN = mechanize(optax.sgd(1.0))
AROUND = {
    "nothing": lambda inner: inner,
    "chain": lambda inner: optax.chain(optax.clip_by_global_norm(1.0), inner),
    "MultiSteps": lambda inner: optax.MultiSteps(inner, every_k_schedule=1).gradient_transformation(),
    "masked": lambda inner: optax.masked(inner, True),
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 3),
    "partition": lambda inner: optax.partition({"a": inner}, lambda params: jax.tree.map(lambda _: "a", params)),
}


def learned(optimizer, steps=20):
    return train(mlp(hidden=4), optimizer, steps)


# Reading.


@pytest.mark.parametrize("around", AROUND)
def test_the_scale_is_read_through_what_stands_around(around):
    optimizer, params = AROUND[around](PLAIN), {"weight": jnp.ones(3)}
    state = optimizer.init(params)
    for _ in range(2):
        _, state = jax.jit(optimizer.update)(params, state, params)
    assert scale(state) > 0
    assert scales({"step": 3, "optimizer": state}) == {"default": scale(state)}
    assert jax.jit(scale)(state) == scale(state)


def test_it_may_be_built_or_wrapped_by_inject_hyperparams():
    injected = optax.inject_hyperparams(mechanize)(optax.sgd(0.5), unit=0.5)
    around = mechanize(optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(0.5)), unit=0.5)
    expected, _ = learned(PLAIN, steps=5)
    for optimizer in (injected, around):
        params, state = learned(optimizer, steps=5)
        assert scale(state) > 0
        assert same_bits(params, expected)


def test_states_that_hold_no_tuner_or_several_of_one_name_say_so():
    params = mlp(hidden=4)
    with pytest.raises(ValueError, match=r"no state of mechanic\.jax\.mechanize in a tuple"):
        scale(optax.adam(1.0).init(params))
    two = mechanize(optax.sgd(1.0)).init(params), mechanize(optax.sgd(1.0)).init(params)
    with pytest.raises(ValueError, match="several Mechanics with a tuner named 'default'"):
        scales(two)
    with pytest.raises(ValueError, match="not one tuner but 2, a, b"):
        scale(mechanize(optax.sgd(1.0), labels={"first": "a", "last": "b"}).init(params))


# Labels.


def test_labels_tune_parts_as_if_they_were_alone():
    """Where the gradients do not depend on the other part."""
    labels = {"first": "a", "last": "b"}
    together, params = mechanize(optax.adam(1.0), labels=labels), mlp(hidden=4)
    state, step = together.init(params), jax.jit(together.update)
    alone = {part: mechanize(optax.adam(1.0)) for part in labels}
    steps = {part: jax.jit(alone[part].update) for part in labels}
    parts = {part: (params[part], alone[part].init(params[part])) for part in labels}
    for t in range(5):
        grads = jax.tree.map(lambda p, t=t: jnp.cos(p + t), params)
        updates, state = step(grads, state, params)
        for part, (x, own) in parts.items():
            update, own = steps[part](grads[part], own, x)
            np.testing.assert_allclose(updates[part], update, rtol=1e-5, atol=1e-7)
            parts[part] = optax.apply_updates(x, update), own
        params = optax.apply_updates(params, updates)
    for part, name in labels.items():
        assert scales(state)[name] == pytest.approx(float(scale(parts[part][1])), rel=1e-5)
    assert scales(state)["a"] != scales(state)["b"]
    assert state.tuner.scales.shape == (2, 5)


def test_labels_may_be_a_function():
    def by_shape(params):
        return jax.tree.map(lambda p: f"{p.shape[0]} rows", params)

    _, state = learned(mechanize(optax.sgd(1.0), labels=by_shape), steps=3)
    assert sorted(scales(state)) == ["4 rows", "64 rows"]


# Bad numbers.


def test_a_gradient_that_is_not_finite_leaves_its_tuner_alone_and_the_others_go_on():
    optimizer = mechanize(optax.adamw(1.0), labels={"first": "a", "last": "b"})
    step = jax.jit(optimizer.update)
    params = mlp(hidden=4)
    _, state = step(params, optimizer.init(params), params)
    good = gradient_of(params, *batch(9))
    _, zeroed = step({**good, "first": jnp.zeros_like(good["first"])}, state, params)
    for bad in (jnp.inf, -jnp.inf, jnp.nan, 3e38):
        updates, after = step({**good, "first": good["first"].at[2, 1].set(bad)}, state, params)
        for new, old in zip(after.tuner, state.tuner, strict=True):
            np.testing.assert_array_equal(new[0], old[0])
        assert (after.tuner.root_variance[1] != state.tuner.root_variance[1]).all()
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, after)))
        assert same_bits(after.base, zeroed.base)


def test_100_steps_with_bad_ones_among_them_still_train():
    optimizer = mechanize(optax.adam(1.0))
    step, params = jax.jit(optimizer.update), mlp()
    state, start = optimizer.init(params), train_loss(params)
    for t in range(100):
        grads = gradient_of(params, *batch(t))
        if t % 7 == 0:
            grads["last"] = grads["last"].at[0, t % 10].set(jnp.nan)
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert train_loss(params) < start / 2


def test_steps_without_a_gradient_change_neither_tuner_nor_parameters():
    params, state = learned(PLAIN, steps=5)
    updates, after = jax.jit(PLAIN.update)(jax.tree.map(jnp.zeros_like, params), state, params)
    assert same_bits(after, state)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))


# Observed gradients.


def test_observed_gradients_are_what_the_tuner_learns_from():
    tuned = mechanize(optax.sgd(1.0), config={"forgetting": 0.0})  # so that a difference of Deltas is the base's update
    params, state = learned(tuned, steps=5)
    grads, held_out = gradient_of(params, *batch(7)), gradient_of(params, *batch(8))
    _, expected = jax.jit(tuned.update)(held_out, state, params)
    observing = jax.jit(lambda *args: tuned.update(*args[:3], observed=args[3]))
    _, after = observing(grads, state, params, held_out)
    assert scale(after) == scale(expected)
    u = jax.tree.map(lambda g: -g, grads)
    assert all(
        np.allclose(new, old + step, rtol=1e-6)
        for new, old, step in zip(*(jax.tree.leaves(t) for t in (after.delta, state.delta, u)), strict=True)
    )
    broken = jax.tree.map(lambda g: g * jnp.nan, grads)
    _, after = observing(broken, state, params, held_out)
    assert scale(after) == scale(expected)  # the feedback is good, the base gets zeros
    assert same_bits(after.delta, state.delta)
    _, after = observing(grads, state, params, broken)
    assert same_bits(after.tuner, state.tuner)


def test_observed_gradients_find_their_way_past_frozen_parameters():
    params = {"free": jnp.asarray([1.0, -2.0]), "frozen": jnp.ones(3)}
    optimizer = mechanize(optax.sgd(1.0))
    around = optax.selective_transform(optimizer, freeze_mask={"free": False, "frozen": True})
    state, alone = around.init(params), optimizer.init(params["free"])

    def step(optimizer, x, state):
        return optimizer.update(x, state, x, observed=jax.tree.map(jnp.cos, x))

    for _ in range(2):
        updates, state = jax.jit(step, static_argnums=0)(around, params, state)
        update, alone = jax.jit(step, static_argnums=0)(optimizer, params["free"], alone)
    assert 0 < scale(state) == scale(alone)
    assert same_bits(updates, {"free": update, "frozen": jnp.zeros(3)})


def test_further_arguments_reach_the_base():
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        seen.append((value, sorted(extra)))
        return updates, state

    base = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    optimizer = mechanize(base)
    jax.eval_shape(
        lambda x: optimizer.update(x, optimizer.init(x), x, value=3.0, observed=x, other=1), jax.typeof(jnp.ones(2))
    )
    assert seen == [(3.0, ["other"])]


# Differentiation and ensembles.


def test_an_ensemble_is_its_members():
    optimizer = mechanize(optax.sgd(1.0))
    members = jax.random.normal(jax.random.key(0), (3, 5))

    def run(x):
        state = optimizer.init(x)
        for _ in range(2):
            updates, state = optimizer.update(jnp.sin(x), state, x)
            x = optax.apply_updates(x, updates)
        return x, scale(state)

    together, s = jax.jit(jax.vmap(run))(members)
    alone = jax.jit(run)
    for i, member in enumerate(members):
        x, own = alone(member)
        np.testing.assert_allclose(together[i], x, rtol=1e-5)
        np.testing.assert_allclose(s[i], own, rtol=1e-5)


def test_a_run_can_be_differentiated_with_the_scale_as_given():
    optimizer = mechanize(optax.sgd(1.0), config={"forgetting": 0.0})  # x = x_1 + S Delta, as written out below
    start = jnp.asarray([1.0, -2.0, 0.5])

    def run(factor):
        x, state, course = start, optimizer.init(start), []
        for _ in range(3):
            updates, state = optimizer.update(factor * x**3, state, x)
            x = optax.apply_updates(x, updates)
            course.append(scale(state))
        return x, course

    def written_out(factor, course):
        x, delta = start, 0.0
        for s in course:
            delta -= factor * x**3
            x = start + s * delta
        return x

    derivative, course = jax.jit(jax.jacobian(run, has_aux=True))(1.0)
    expected = jax.jit(jax.jacobian(written_out))(1.0, course)
    np.testing.assert_allclose(derivative, expected, rtol=1e-4)


def test_complex_parameters_move_as_pairs_of_real_ones():
    optimizer = mechanize(optax.sgd(1.0))
    x = jnp.asarray([1.0 + 2.0j, -0.5 + 0.1j])
    pair = jnp.stack([x.real, x.imag])
    state, pair_state, update = optimizer.init(x), optimizer.init(pair), jax.jit(optimizer.update)
    for _ in range(4):
        updates, state = update(2 * x, state, x)
        x = optax.apply_updates(x, updates)
        updates, pair_state = update(2 * pair, pair_state, pair)
        pair = optax.apply_updates(pair, updates)
    np.testing.assert_allclose(jnp.stack([x.real, x.imag]), pair, rtol=1e-5)


# Keeping what was learned.


@pytest.mark.parametrize(
    ("around", "dtype"), [("nothing", jnp.float32), ("chain", jnp.bfloat16), ("MultiSteps", jnp.float32)]
)
def test_a_frozen_state_goes_on_at_the_learned_scale_without_delta(around, dtype):
    optimizer = AROUND[around](mechanize(optax.sgd(0.1), unit=0.1))
    params, state = train(mlp(hidden=4, dtype=dtype), optimizer, 10)
    frozen = freeze(state)
    saved = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
    delta, tuner = 4 * sum(leaf.size for leaf in jax.tree.leaves(params)), 4 * 5 * len(TunerState._fields)
    assert saved == delta + tuner
    trained, after = train(params, optimizer, 20, state=frozen)
    assert stepper(optimizer)._cache_size() == 2  # one before, one after
    assert scale(after) == scale(state)
    assert train_loss(trained) < train_loss(params)


def test_freezing_is_the_base_at_the_learned_rate():
    optimizer = mechanize(optax.adam(0.1), unit=0.1)
    params, state = learned(optimizer)
    plain, plain_state = release(optax.adam(0.1), state, unit=0.1)
    rate = float(scale(state))
    written_out = optax.adam(rate)
    frozen, _ = train(params, optimizer, 10, state=freeze(state))
    released, _ = train(params, plain, 10, state=plain_state)
    expected, _ = train(params, written_out, 10, state=plain_state)
    for ours, other, leaf in zip(*map(jax.tree.leaves, (frozen, released, expected)), strict=True):
        np.testing.assert_allclose(ours, leaf, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(other, leaf, rtol=1e-3, atol=1e-6)


def test_labels_are_released_each_at_its_own_rate():
    labels = {"first": "a", "last": "b"}
    params, state = learned(mechanize(optax.sgd(1.0), labels=labels))
    plain, plain_state = release(optax.sgd(1.0), state, labels=labels)
    updates, _ = plain.update(params, plain_state, params)
    for part, name in labels.items():
        np.testing.assert_allclose(updates[part], -scales(state)[name] * params[part], rtol=1e-6)


def test_nothing_can_be_kept_before_anything_was_learned():
    state = mechanize(optax.sgd(1.0)).init(jnp.ones(2))
    with pytest.raises(ValueError, match="nothing has been learned yet"):
        freeze(state)
    with pytest.raises(ValueError, match="nothing has been learned yet"):
        release(optax.sgd(1.0), state)


# Cost.


def test_a_step_moves_fewer_bytes_than_optaxs_mechanize_and_keeps_one_number_per_parameter():
    bare, ours, theirs = (jax_step.cost_of(jax_step.build(name, side=100)) for name in jax_step.CONTENDERS)
    assert ours.words < 2.1 * bare.words
    assert ours.words < 0.9 * theirs.words
    assert ours.state == pytest.approx(bare.state + 4, abs=0.01)
    assert ours.temporary < 4.5


# Refusals and imports.


@pytest.mark.parametrize(
    "base",
    [
        optax.contrib.prodigy(),
        optax.contrib.schedule_free_sgd(),
        optax.contrib.mechanize(optax.sgd(1.0)),
        mechanize(optax.sgd(1.0)),
        optax.chain(optax.clip(1.0), optax.contrib.dog()),
        optax.lbfgs(),
    ],
    ids=["prodigy", "schedule_free", "optax's mechanize", "ours", "dog in a chain", "line search"],
)
def test_bases_that_make_no_sense_are_refused(base):
    with pytest.raises(TypeError, match="mechanize cannot wrap a base that holds a"):
        mechanize(base).init(jnp.ones(3))


def test_wrong_arguments_are_explained():
    with pytest.raises(TypeError, match=r"got <function sgd .*write mechanize\(optax\.adamw\(1\.0\)\)"):
        mechanize(optax.sgd)
    with pytest.raises(ValueError, match="unit must be a positive learning rate, got 0"):
        mechanize(optax.sgd(1.0), unit=0)
    with pytest.raises(TypeError, match="no field lamda"):
        mechanize(optax.sgd(1.0), config={"lamda": 1.0})
    optimizer = mechanize(optax.sgd(1.0), config=TunerConfig.paper())
    state = optimizer.init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"write optimizer\.update\(grads, state, params\)"):
        optimizer.update(jnp.ones(2), state)
    with pytest.raises(ValueError, match=r"named \['default'\], the labels name \['a'\]"):
        mechanize(optax.sgd(1.0), labels="a").update(jnp.ones(2), state, jnp.ones(2))
    with pytest.raises(ValueError, match="the state has 6 scales per tuner, the config 1 betas"):
        mechanize(optax.sgd(1.0), config={"betas": (0.9,)}).update(jnp.ones(2), state, jnp.ones(2))
    params = {"weight": jnp.ones(2), "count": jnp.arange(2)}
    with pytest.raises(TypeError, match=r"\['count'\] is int32; leave it out"):
        optimizer.init(params)
    with pytest.raises(ValueError, match=r"labels must be a prefix of the parameters(.|\n)*weight"):
        mechanize(optax.sgd(1.0), labels={"count": "a"}).init({**params, "count": jnp.ones(2)})


def test_importing_it_imports_no_other_framework():
    """What the others import is in test_readme.py."""
    code = "import sys, mechanic.jax; assert not {'torch', 'flax', 'equinox'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
