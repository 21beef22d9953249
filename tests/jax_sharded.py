"""Run by test_jax_sharding.py on eight host devices: ``python tests/jax_sharded.py CHECK...``."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mechanic.jax import mechanize, scales

SHAPES = {"first": (64, 16), "last": (16, 24), "gain": (16,), "offset": ()}
LAYOUTS = {
    "over 8": ((8,), {"first": P("a"), "last": P(None, "a"), "gain": P("a"), "offset": P()}),
    "over 4 x 2": ((4, 2), {"first": P("a", "b"), "last": P(("a", "b")), "gain": P("b"), "offset": P()}),
    "over 4 of 4 x 2": ((4, 2), {"first": P("a"), "last": P(None, "a"), "gain": P(), "offset": P()}),
}
LABELS = {"first": "body", "last": "head", "gain": "body", "offset": "head"}


def make():
    return mechanize(optax.adamw(optax.cosine_decay_schedule(1.0, 60)), labels=LABELS)


def start(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.normal(size=shape) / 8, dtype) for name, shape in SHAPES.items()}


def loss_of(params, inputs):
    hidden = jnp.tanh(inputs @ params["first"]) * params["gain"]
    return jnp.mean((hidden @ params["last"] + params["offset"] - inputs[:, :24]) ** 2)


def inputs(t):
    return np.asarray(np.random.default_rng(t).normal(size=(16, 64)), np.float32)


def step(optimizer, params, state, x):
    updates, state = optimizer.update(jax.grad(loss_of)(params, x), state, params)
    return optax.apply_updates(params, updates), state


def run(params, state, steps=30):
    stepping = jax.jit(functools.partial(step, make()), donate_argnums=(0, 1))
    for t in range(steps):
        params, state = stepping(params, state, inputs(t))
    return params, state


def place(tree, mesh, specs):
    return {name: jax.device_put(tree[name], NamedSharding(mesh, specs[name])) for name in tree}


def mesh_of(shape, kind=AxisType.Auto):
    return jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(kind,) * len(shape))


def assert_same(ours, expected):
    (params, state), (plain, plain_state) = ours, expected
    for name in SHAPES:
        error = np.linalg.norm(np.asarray(params[name]) - np.asarray(plain[name]))
        assert error <= 1e-6 * max(1.0, np.linalg.norm(plain[name])), (name, error)
    for name, s in scales(plain_state).items():
        assert s > 0
        np.testing.assert_allclose(scales(state)[name], s, rtol=1e-6)


def collectives(compiled):
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"= [^=]* ({kinds})(?:-start)?\(", compiled.as_text())


@functools.cache
def on_one_device():
    params = jax.tree.map(jnp.asarray, start(np.float64))
    return run(params, make().init(params))


@functools.cache
def with_given_gradients():
    params, update = jax.tree.map(jnp.asarray, start()), jax.jit(make().update)
    state, grads = make().init(params), jax.tree.map(jnp.cos, params)
    for _ in range(10):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def check_result_of_one_device():
    """In float32, each step with the same gradients."""
    for layout, (shape, specs) in LAYOUTS.items():
        params = place(start(), mesh_of(shape), specs)
        grads = jax.tree.map(jnp.cos, params)
        state, update = jax.jit(make().init)(params), jax.jit(make().update)
        for _ in range(10):
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        assert_same((params, state), with_given_gradients())
        for name in SHAPES:
            assert state.delta[name].sharding.is_equivalent_to(params[name].sharding, params[name].ndim), (layout, name)


def check_training_of_one_device():
    """In float64: in float32 sharded products round differently, and training amplifies that (docs/jax.md)."""
    with jax.enable_x64(True):
        for layout in ("over 8", "over 4 x 2"):
            shape, specs = LAYOUTS[layout]
            params = place(start(np.float64), mesh_of(shape), specs)
            assert_same(run(params, jax.jit(make().init)(params)), on_one_device())


def check_one_all_reduce():
    for shape, specs in LAYOUTS.values():
        params = place(start(), mesh_of(shape), specs)
        update = jax.jit(make().update)
        assert collectives(update.lower(params, make().init(params), params).compile()) == ["all-reduce"]
    everywhere = place(start(), mesh_of((8,)), dict.fromkeys(SHAPES, P()))
    assert collectives(update.lower(everywhere, make().init(everywhere), everywhere).compile()) == []


def check_result_on_explicit_axes():
    for layout in ("over 8", "over 4 of 4 x 2"):
        shape, specs = LAYOUTS[layout]
        mesh = mesh_of(shape, AxisType.Explicit)
        with jax.set_mesh(mesh):
            params = place(start(), mesh, specs)
            x = {name: jax.device_put(np.cos(value), params[name].sharding) for name, value in start().items()}
            state = jax.jit(make().init)(params)
            update = jax.jit(make().update)
            for _ in range(10):
                updates, state = update(x, state, params)
                params = optax.apply_updates(params, updates)
            assert collectives(update.lower(x, state, params).compile()) == ["all-reduce"]
        assert_same((params, state), with_given_gradients())


def check_shard_map():
    """Each device steps on its own shards; what is replicated counts once where JAX tracks it."""
    shape, specs = LAYOUTS["over 8"]
    whole = jax.tree.map(jnp.asarray, start())
    grads = jax.tree.map(jnp.cos, whole)
    optimizer = mechanize(optax.adamw(optax.cosine_decay_schedule(1.0, 60)), labels=LABELS, axis_name="a")
    mesh = mesh_of(shape)
    state = optimizer.init(whole)
    of_state = optax.tree.map_params(optimizer, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P())

    def body(params, state, grads):
        def once(carry, _):
            params, state = carry
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(once, (params, state), length=10)[0]

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs, of_state, specs), out_specs=(specs, of_state)))
    assert collectives(mapped.lower(whole, state, grads).compile()) == ["all-reduce"]
    assert_same(mapped(whole, state, grads), with_given_gradients())


def check_shard_map_without_tracking():
    """Then every shard counts as different, which holds where all parameters are cut."""
    mesh, x = mesh_of((8,)), jnp.asarray(start()["first"])
    optimizer = mechanize(optax.sgd(1.0), axis_name="a")
    state = optimizer.init(x)
    of_state = optax.tree.map_params(optimizer, lambda _: P("a"), state, transform_non_params=lambda _: P())
    mapped = jax.shard_map(
        optimizer.update, mesh=mesh, in_specs=(P("a"), of_state, P("a")), out_specs=(P("a"), of_state), check_vma=False
    )
    plain = mechanize(optax.sgd(1.0))
    _, ours = jax.jit(mapped)(jnp.cos(x), jax.jit(mapped)(jnp.cos(x), state, x)[1], x)
    _, expected = plain.update(jnp.cos(x), plain.update(jnp.cos(x), plain.init(x), x)[1], x)
    np.testing.assert_allclose(scales(ours)["default"], scales(expected)["default"], rtol=1e-6)


def check_data_parallel_in_shard_map():
    """Every shard holds all parameters, so no axis is to be named."""
    mesh, optimizer = mesh_of((8,)), make()

    def body(params, state, x):
        grads = jax.lax.pmean(jax.grad(loss_of)(jax.lax.pcast(params, "a", to="varying"), x), "a")
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(), P(), P("a")), out_specs=(P(), P())))
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, start(np.float64))
        state = optimizer.init(params)
        for t in range(30):
            params, state = mapped(params, state, inputs(t))
        assert_same((params, state), on_one_device())


def check_ensembles_and_uneven_shards():
    mesh = mesh_of((8,))
    optimizer = mechanize(optax.sgd(1.0))

    def twice(x):
        state = optimizer.init(x)
        for _ in range(2):
            _, state = optimizer.update(jnp.cos(x), state, x)
        return scales(state)["default"]

    members = jnp.asarray(start()["first"])
    sharded = jax.device_put(members, NamedSharding(mesh, P("a")))
    np.testing.assert_allclose(jax.jit(jax.vmap(twice))(sharded), jax.jit(jax.vmap(twice))(members), rtol=1e-6)

    def uneven(x):
        return twice(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("a"))))

    x = members[:10]
    replicated = jax.device_put(x, NamedSharding(mesh, P()))
    np.testing.assert_allclose(jax.jit(uneven)(replicated), jax.jit(twice)(x), rtol=1e-6)


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    for name in sys.argv[1:]:
        globals()[f"check_{name}"]()
