"""A run that is saved in its middle and resumed continues bit for bit, whatever way the state was saved."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from mechanic.jax import freeze, mechanize, scale
from mechanic.jax.state import find
from tests.jax.task import LABELS, PLAIN, mlp, same_bits, train

STEPS, SAVED_AT = 20, 12
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 5, STEPS)


def momentum_at(lr):
    return optax.sgd(lr, momentum=0.9)


SETUPS = {
    "two tuners": (lambda: mechanize(momentum_at(1.0), labels=LABELS), jnp.float32),
    "a schedule with a peak of 3e-4": (
        lambda: mechanize(optax.adamw(SCHEDULE), peak_lr=3e-4, schedule=SCHEDULE),
        jnp.float32,
    ),
    "bfloat16, clipped, Delta in int8": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), mechanize(optax.adamw(1.0), delta="int8")),
        jnp.bfloat16,
    ),
    "float16, accumulated, Delta in bfloat16": (
        lambda: optax.MultiSteps(mechanize(momentum_at(1.0), delta="bfloat16"), 5).gradient_transformation(),
        jnp.float16,
    ),
}
OF_ALL_KINDS = "bfloat16, clipped, Delta in int8"


def through_pickle(run, folder):
    """As NumPy arrays, in a file."""
    (folder / "state").write_bytes(pickle.dumps(jax.tree.map(np.asarray, run)))
    return jax.tree.map(jnp.asarray, pickle.loads((folder / "state").read_bytes()))


def through_orbax(run, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", run)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), run)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "state", like)


def through_deepcopy(run, folder):
    return copy.deepcopy(run)


@functools.cache
def former_and_new(name):
    """An optimizer, and one of its own for the resumed run, as in a new process."""
    make, _ = SETUPS[name]
    return make(), make()


@functools.cache
def half_a_run(name):
    _, dtype = SETUPS[name]
    return train(mlp(hidden=4, dtype=dtype), former_and_new(name)[0], SAVED_AT)


def check_resumes(name, run, restored):
    """Against going on without a stop."""
    assert same_bits(restored, run)
    expected, resumed = (
        train(params, optimizer, STEPS - SAVED_AT, state=state, first=SAVED_AT)
        for optimizer, (params, state) in zip(former_and_new(name), (run, restored), strict=True)
    )
    assert same_bits(resumed, expected)
    assert not same_bits(resumed[0], run[0])


@pytest.mark.long
@pytest.mark.parametrize("name", SETUPS)
def test_a_run_resumes_from_a_pickle_of_numpy_arrays_bit_for_bit(name, tmp_path):
    run = half_a_run(name)
    assert all(s > 0 for mechanic in find(run[1]) for s in mechanic.scale.values())
    check_resumes(name, run, through_pickle(run, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("through", [through_orbax, through_deepcopy])
def test_a_run_resumes_from_other_copies_bit_for_bit(through, tmp_path):
    run = half_a_run(OF_ALL_KINDS)
    check_resumes(OF_ALL_KINDS, run, through(run, tmp_path))


@pytest.mark.long
def test_a_frozen_run_resumes_frozen(tmp_path):
    params, state = half_a_run(OF_ALL_KINDS)
    restored = through_pickle((params, freeze(state)), tmp_path)
    assert find(restored[1])[0].delta is None
    assert scale(restored[1]) == scale(state)
    check_resumes(OF_ALL_KINDS, (params, freeze(state)), restored)


@pytest.mark.parametrize("saved_at", [0, 1, 2])
def test_a_run_may_be_saved_before_anything_is_learned(saved_at, tmp_path):
    run = train(mlp(hidden=4), PLAIN, saved_at)
    restored = through_pickle(run, tmp_path)
    ours, expected = (train(params, PLAIN, 5, state=state, first=saved_at) for params, state in (restored, run))
    assert scale(ours[1]) > 0
    assert same_bits(ours, expected)
