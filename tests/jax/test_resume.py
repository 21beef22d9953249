"""A run that is saved in its middle and resumed continues bit for bit, whatever way the state was saved."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from mechanic.jax import freeze, mechanize, scale
from mechanic.jax.state import find
from tests.jax.task import mlp, same_bits, stepper, train

STEPS, SAVED_AT = 20, 12
LABELS = {"first": "a", "last": "b"}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1.0, 5, STEPS)


def momentum_at(lr):
    return optax.sgd(lr, momentum=0.9)


SETUPS = {
    "SGD with momentum": (lambda: mechanize(momentum_at(1.0)), jnp.float32),
    "AdamW, a peak of 3e-4": (lambda: mechanize(optax.adamw(3e-4), peak_lr=3e-4), jnp.float32),
    "AdamW, a schedule": (lambda: mechanize(optax.adamw(SCHEDULE), schedule=SCHEDULE), jnp.float32),
    "two tuners": (lambda: mechanize(optax.adam(1.0), labels=LABELS), jnp.float32),
    "bfloat16, clipped": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), mechanize(optax.adamw(1.0))),
        jnp.bfloat16,
    ),
    "float16, accumulated": (
        lambda: optax.MultiSteps(mechanize(momentum_at(1.0)), every_k_schedule=5).gradient_transformation(),
        jnp.float16,
    ),
}


def through_pickle(run, folder):
    """As NumPy arrays, in a file."""
    (folder / "state").write_bytes(pickle.dumps(jax.tree.map(np.asarray, run)))
    return jax.tree.map(jnp.asarray, pickle.loads((folder / "state").read_bytes()))


def through_numpy(run, folder):
    """Leaf by leaf, as raw bytes."""
    leaves, structure = jax.tree.flatten(run)
    for i, leaf in enumerate(leaves):
        (folder / f"{i}").write_bytes(np.asarray(leaf).tobytes())
    read = [np.frombuffer((folder / f"{i}").read_bytes(), leaf.dtype) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, [jnp.asarray(a.reshape(b.shape)) for a, b in zip(read, leaves, strict=True)])


def through_orbax(run, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", run)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), run)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "state", like)


WAYS = {"pickle": through_pickle, "numpy": through_numpy, "orbax": through_orbax}


def check_resumes(make, run, way, folder):
    """Against going on without a stop; the resumed run has an optimizer of its own, as in a new process."""
    former, new = make(), make()
    restored = WAYS[way](run, folder)
    assert same_bits(restored, run)
    left = STEPS - SAVED_AT
    expected = train(run[0], former, left, state=run[1], first=SAVED_AT)
    resumed = train(restored[0], new, left, state=restored[1], first=SAVED_AT, step=stepper(new))
    assert same_bits(resumed, expected)
    assert not same_bits(resumed[0], run[0])


@pytest.mark.parametrize("name", SETUPS)
def test_a_run_resumes_from_a_pickle_of_numpy_arrays_bit_for_bit(name, tmp_path):
    make, dtype = SETUPS[name]
    run = train(mlp(hidden=4, dtype=dtype), make(), SAVED_AT)
    assert all(s > 0 for mechanic in find(run[1]) for s in mechanic.scale.values())
    check_resumes(make, run, "pickle", tmp_path)


@pytest.mark.parametrize("way", ["numpy", "orbax"])
def test_a_run_resumes_from_other_files_bit_for_bit(way, tmp_path):
    """Through a chain, with half-precision parameters."""
    make, dtype = SETUPS["bfloat16, clipped"]
    run = train(mlp(hidden=4, dtype=dtype), make(), SAVED_AT)
    check_resumes(make, run, way, tmp_path)


def test_a_frozen_run_resumes_frozen(tmp_path):
    make, dtype = SETUPS["bfloat16, clipped"]
    params, state = train(mlp(hidden=4, dtype=dtype), make(), SAVED_AT)
    restored = through_pickle((params, freeze(state)), tmp_path)
    assert find(restored[1])[0].delta is None
    assert scale(restored[1]) == scale(state)
    check_resumes(make, (params, freeze(state)), "pickle", tmp_path)


@pytest.mark.parametrize("saved_at", [0, 1, 2])
def test_a_run_may_be_saved_before_anything_is_learned(saved_at, tmp_path):
    optimizer = mechanize(optax.adamw(1.0))
    run = train(mlp(hidden=4), optimizer, saved_at)
    restored = through_pickle(run, tmp_path)
    ours, expected = (train(params, optimizer, 5, state=state, first=saved_at) for params, state in (restored, run))
    assert scale(ours[1]) > 0
    assert same_bits(ours, expected)
