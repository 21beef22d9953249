"""Run by test_delta_storage.py on eight host devices: ``python -m tests.jax.sharded_storage``."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mechanic.jax import mechanize, scales
from tests.jax.sharded import LABELS, LAYOUTS, SHAPES, apply, assert_same, collectives, mesh_of, place, start

STORAGES = ("bfloat16", "int8")


def make(delta, **options):
    return mechanize(optax.adamw(optax.cosine_decay_schedule(1.0, 60)), labels=LABELS, delta=delta, **options)


@functools.cache
def stepper(delta):
    return jax.jit(functools.partial(apply, make(delta)))


def run(delta, params, steps=10):
    grads, state = jax.tree.map(jnp.cos, params), jax.jit(make(delta).init)(params)
    for _ in range(steps):
        params, state = stepper(delta)(grads, params, state)
    return params, state


@functools.cache
def on_one_device(delta):
    return run(delta, jax.tree.map(jnp.asarray, start()))


def assert_follows(delta, ended):
    """Blocks and random numbers depend on the shapes alone, so Delta is rounded alike."""
    assert_same(ended, on_one_device(delta), 5e-6)
    for name in SHAPES:
        ours, expected = (np.asarray(state.delta[name], np.float32) for _, state in (ended, on_one_device(delta)))
        assert np.mean(ours != expected) <= 0.01, name


def check_every_layout_rounds_as_one_device_does():
    """Also where a block lies on several devices, as most of these small ones do."""
    for delta, layout, kind in (
        ("bfloat16", "over 8", AxisType.Auto),
        ("bfloat16", "over 4 of 4 x 2", AxisType.Explicit),
        ("int8", "over 8", AxisType.Auto),
        ("int8", "over 4 x 2", AxisType.Explicit),
    ):
        shape, specs = LAYOUTS[layout]
        mesh = mesh_of(shape, kind)
        with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
            params = place(start(), mesh, specs)
            ended = run(delta, params)
        assert_follows(delta, ended)
        for name in SHAPES:
            assert ended[1].delta[name].sharding.is_equivalent_to(params[name].sharding, params[name].ndim)


def check_whole_blocks_need_one_all_reduce_and_one_program():
    mesh, rng = mesh_of((4, 2)), np.random.default_rng(0)
    layout = {
        "first": ((64, 1024), P("a", "b")),
        "last": ((2048,), P("b")),
        "gain": ((256, 64), P("a")),
        "offset": ((), P()),
    }
    params = {
        name: jax.device_put(rng.normal(size=shape).astype(np.float32), NamedSharding(mesh, spec))
        for name, (shape, spec) in layout.items()
    }
    for delta in STORAGES:
        step = jax.jit(functools.partial(apply, make(delta)))
        grads, state = jax.tree.map(jnp.cos, params), jax.jit(make(delta).init)(params)
        moved = params
        for _ in range(4):
            moved, state = step(grads, moved, state)
        assert collectives(step.lower(grads, moved, state).compile()) == ["all-reduce"], delta
        assert step._cache_size() <= 2  # the first state of jit(init) has its small arrays on one device
        for name, p in params.items():
            for kept in (state.delta, state.delta_scales if delta == "int8" else state.delta):
                assert kept[name].sharding.is_equivalent_to(p.sharding, p.ndim), (delta, name)


def check_shard_map():
    """Shards have blocks and random numbers of their own, so they follow one device within rounding."""
    shape, specs = LAYOUTS["over 8"]
    mesh = mesh_of(shape)
    whole = jax.tree.map(jnp.asarray, start())
    grads = jax.tree.map(jnp.cos, whole)
    for delta in STORAGES:
        optimizer = make(delta, axis_name="a")
        of_state = optax.tree.map_params(
            optimizer, lambda _, spec: spec, optimizer.init(whole), specs, transform_non_params=lambda _: P()
        )
        init = jax.shard_map(optimizer.init, mesh=mesh, in_specs=(specs,), out_specs=of_state)
        step = jax.shard_map(
            lambda params, state, grads, optimizer=optimizer: apply(optimizer, grads, params, state),
            mesh=mesh,
            in_specs=(specs, of_state, specs),
            out_specs=(specs, of_state),
        )
        params, state = whole, jax.jit(init)(whole)
        jitted = jax.jit(step)
        for _ in range(10):
            params, state = jitted(params, state, grads)
        expected, wide = on_one_device(delta)
        for name, s in scales(wide).items():
            np.testing.assert_allclose(scales(state)[name], s, rtol=0.05)
        for name, p in params.items():
            assert np.linalg.norm(p - expected[name]) <= 0.05 * np.linalg.norm(expected[name]), name


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
