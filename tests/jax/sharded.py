"""Run by test_parallel.py on eight host devices: ``python -m tests.jax.sharded``."""

import functools
import re

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


def make(base=optax.adamw):
    return mechanize(base(optax.cosine_decay_schedule(1.0, 60)), labels=LABELS)


def start(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.normal(size=shape) / 8, dtype) for name, shape in SHAPES.items()}


def loss_of(params, inputs):
    hidden = jnp.tanh(inputs @ params["first"]) * params["gain"]
    return jnp.mean((hidden @ params["last"] + params["offset"] - inputs[:, :24]) ** 2)


def inputs(t):
    return np.asarray(np.random.default_rng(t).normal(size=(16, 64)), np.float32)


def apply(optimizer, grads, params, state):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def train(params, base=optax.adamw):
    optimizer = make(base)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        return apply(optimizer, jax.grad(loss_of)(params, x), params, state)

    state = jax.jit(optimizer.init)(params)
    for t in range(30):
        params, state = step(params, state, inputs(t))
    return params, state


@functools.cache
def step_with_gradients():
    return jax.jit(functools.partial(apply, make()))


def run_with_gradients(grads, params, state, steps=10):
    for _ in range(steps):
        params, state = step_with_gradients()(grads, params, state)
    return params, state


def place(tree, mesh, specs):
    return {name: jax.device_put(tree[name], NamedSharding(mesh, specs[name])) for name in tree}


def mesh_of(shape, kind=AxisType.Auto):
    return jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(kind,) * len(shape))


def assert_same(ours, expected, tolerance=1e-6):
    """Returns the largest difference of a parameter, relative to its norm where that is above 1."""
    (params, state), (plain, plain_state) = ours, expected
    errors = {
        name: np.linalg.norm(np.asarray(params[name]) - np.asarray(plain[name])) / max(1.0, np.linalg.norm(plain[name]))
        for name in SHAPES
    }
    assert max(errors.values()) <= tolerance, errors
    for name, s in scales(plain_state).items():
        assert s > 0
        np.testing.assert_allclose(scales(state)[name], s, rtol=tolerance)
    return max(errors.values())


def collectives(compiled):
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text())


def assert_few_all_reduces(compiled, layout):
    """Nothing is gathered. There is one for each way in which parameters are sharded."""
    assert collectives(compiled) == ["all-reduce"] * (3 if layout == "over 4 x 2" else 1)


@functools.cache
def trained_on_one_device():
    return train(jax.tree.map(jnp.asarray, start(np.float64)))


@functools.cache
def on_one_device():
    params = jax.tree.map(jnp.asarray, start())
    return run_with_gradients(jax.tree.map(jnp.cos, params), params, make().init(params))


def check_given_gradients():
    """In float32; Delta is laid out like its parameter, before the first step and after the last."""
    for layout, (shape, specs) in LAYOUTS.items():
        params = place(start(), mesh_of(shape), specs)
        grads, state = jax.tree.map(jnp.cos, params), jax.jit(make().init)(params)
        ended, after = run_with_gradients(grads, params, state)
        assert_same((ended, after), on_one_device())
        for name in SHAPES:
            for each in (state.delta, after.delta, make().init(params).delta, ended):
                assert each[name].sharding.is_equivalent_to(params[name].sharding, params[name].ndim), (specs, name)
        assert_few_all_reduces(step_with_gradients().lower(grads, params, state).compile(), layout)


def check_given_gradients_with_an_automatic_mesh_in_context():
    layout = "over 8"
    shape, specs = LAYOUTS[layout]
    with jax.set_mesh(mesh_of(shape)):
        params = place(start(), mesh_of(shape), specs)
        grads, state = jax.tree.map(jnp.cos, params), jax.jit(make().init)(params)
        assert_same(run_with_gradients(grads, params, state), on_one_device())
        assert_few_all_reduces(step_with_gradients().lower(grads, params, state).compile(), layout)


def check_replicated_parameters():
    everywhere = place(start(), mesh_of((8,)), dict.fromkeys(SHAPES, P()))
    compiled = step_with_gradients().lower(everywhere, everywhere, make().init(everywhere)).compile()
    assert collectives(compiled) == []


def check_training():
    with jax.enable_x64(True):
        for layout in ("over 8", "over 4 x 2"):
            shape, specs = LAYOUTS[layout]
            assert_same(train(place(start(np.float64), mesh_of(shape), specs)), trained_on_one_device())


def check_training_in_float32():
    """Sharded products round differently, and training amplifies that; docs/jax.md has what was measured."""
    for name, base in {"AdamW": optax.adamw, "momentum": functools.partial(optax.sgd, momentum=0.9)}.items():
        expected = train(jax.tree.map(jnp.asarray, start()), base)
        for layout in ("over 8", "over 4 x 2"):
            shape, specs = LAYOUTS[layout]
            error = assert_same(train(place(start(), mesh_of(shape), specs), base), expected, 5e-5)
            print(f"float32, 30 training steps, {name}, {layout}: {error:.1e}")


def check_explicit_axes():
    for layout in ("over 8", "over 4 of 4 x 2"):
        shape, specs = LAYOUTS[layout]
        mesh = mesh_of(shape, AxisType.Explicit)
        with jax.set_mesh(mesh):
            params = place(start(), mesh, specs)
            grads, state = jax.tree.map(jnp.cos, params), jax.jit(make().init)(params)
            ended = run_with_gradients(grads, params, state)
            assert_few_all_reduces(step_with_gradients().lower(grads, params, state).compile(), layout)
        assert_same(ended, on_one_device())


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
            return apply(optimizer, grads, params, state), None

        return jax.lax.scan(once, (params, state), length=10)[0]

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs, of_state, specs), out_specs=(specs, of_state)))
    assert collectives(mapped.lower(whole, state, grads).compile()) == ["all-reduce"]
    assert_same(mapped(whole, state, grads), on_one_device())


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
    expected = state
    for _ in range(2):
        _, state = jax.jit(mapped)(jnp.cos(x), state, x)
        _, expected = jax.jit(plain.update)(jnp.cos(x), expected, x)
    assert scales(expected)["default"] > 0
    np.testing.assert_allclose(scales(state)["default"], scales(expected)["default"], rtol=1e-6)


def varying(tree, axis):
    if hasattr(jax.lax, "pcast"):  # since JAX 0.8.2
        return jax.lax.pcast(tree, axis, to="varying")
    return jax.lax.pvary(tree, axis)


def check_data_parallel_in_shard_map():
    """Every shard holds all parameters, so no axis is to be named."""
    mesh, optimizer = mesh_of((8,)), make()

    def body(params, state, x):
        grads = jax.lax.pmean(jax.grad(loss_of)(varying(params, "a"), x), "a")
        return apply(optimizer, grads, params, state)

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(), P(), P("a")), out_specs=(P(), P())))
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, start(np.float64))
        state = optimizer.init(params)
        for t in range(30):
            params, state = mapped(params, state, inputs(t))
        assert_same((params, state), trained_on_one_device())


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
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
