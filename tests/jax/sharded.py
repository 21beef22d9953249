"""Run by test_parallel.py on eight host devices: ``python -m tests.jax.sharded``."""

import contextlib
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


@functools.cache
def make(base=optax.sgd, **options):
    schedule = optax.cosine_decay_schedule(1.0, 60)
    return mechanize(base(schedule), schedule=schedule, labels=LABELS, **options)


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


def run_with_gradients(params, delta=None, steps=10):
    """With SGD, whose state has one layout, so that one program serves all steps. Returns its collectives as well."""
    optimizer, grads = make(delta=delta), jax.tree.map(jnp.cos, params)
    state = jax.jit(optimizer.init)(params)
    assert_laid_out_alike(state.delta, params)
    compiled = jax.jit(functools.partial(apply, optimizer)).lower(grads, params, state).compile()
    for _ in range(steps):
        params, state = compiled(grads, params, state)
    return params, state, collectives(compiled)


def place(tree, mesh, specs):
    return {name: jax.device_put(tree[name], NamedSharding(mesh, specs[name])) for name in tree}


def mesh_of(shape, kind=AxisType.Auto):
    return jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(kind,) * len(shape))


def assert_same(ours, expected, tolerance=1e-6):
    """Returns the largest difference of a parameter, relative to its norm where that is above 1."""
    (params, state, *_), (plain, plain_state, *_) = ours, expected
    errors = {
        name: np.linalg.norm(np.asarray(params[name]) - np.asarray(plain[name])) / max(1.0, np.linalg.norm(plain[name]))
        for name in SHAPES
    }
    assert max(errors.values()) <= tolerance, errors
    for name, s in scales(plain_state).items():
        assert s > 0
        np.testing.assert_allclose(scales(state)[name], s, rtol=tolerance)
    return max(errors.values())


def assert_laid_out_alike(tree, params):
    for name, p in params.items():
        assert tree[name].sharding.is_equivalent_to(p.sharding, p.ndim), name


def collectives(compiled):
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text())


@functools.cache
def trained_on_one_device():
    return train(jax.tree.map(jnp.asarray, start(np.float64)))


@functools.cache
def on_one_device(delta=None):
    return run_with_gradients(jax.tree.map(jnp.asarray, start()), delta)


def check_given_gradients():
    """In float32; Delta is laid out like its parameter, before the first step and after the last."""
    for layout, kind, delta in (
        ("over 8", "in context", None),
        ("over 8", AxisType.Auto, None),
        ("over 4 x 2", AxisType.Auto, None),
        ("over 4 of 4 x 2", AxisType.Auto, None),
        ("over 4 of 4 x 2", AxisType.Explicit, None),
        ("over 8", AxisType.Auto, "bfloat16"),
        ("over 4 of 4 x 2", AxisType.Explicit, "bfloat16"),
        ("over 8", AxisType.Auto, "int8"),
        ("over 4 x 2", AxisType.Explicit, "int8"),
    ):
        shape, specs = LAYOUTS[layout]
        mesh = mesh_of(shape, AxisType.Auto if kind == "in context" else kind)
        with contextlib.nullcontext() if kind is AxisType.Auto else jax.set_mesh(mesh):
            params = place(start(), mesh, specs)
            ended, state, used = run_with_gradients(params, delta)
            if layout == "over 4 x 2" and delta is None:
                assert_laid_out_alike(make().init(params).delta, params)
        assert_laid_out_alike(state.delta, params)
        assert_laid_out_alike(ended, params)
        if delta != "int8":  # whose blocks lie on several devices here, as most of these small ones do
            # Nothing is gathered. There is one for each way in which parameters are sharded.
            assert used == ["all-reduce"] * (3 if layout == "over 4 x 2" else 1), (layout, kind, delta)
        assert_same((ended, state), on_one_device(delta), 5e-6 if delta else 1e-6)
        for name in SHAPES:  # blocks and random numbers depend on the shapes alone, so Delta is rounded alike
            ours, expected = (np.asarray(each.delta[name], np.float32) for each in (state, on_one_device(delta)[1]))
            assert delta is None or np.mean(ours != expected) <= 0.01, name


def check_replicated_parameters():
    everywhere = place(start(), mesh_of((8,)), dict.fromkeys(SHAPES, P()))
    assert run_with_gradients(everywhere, steps=0)[-1] == []


def check_whole_blocks_of_a_rounded_delta_need_one_all_reduce_and_one_program():
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
    for delta in ("bfloat16", "int8"):
        _, state, used = run_with_gradients(params, delta, steps=4)
        assert used == ["all-reduce"] * 2, delta
        for kept in (state.delta, state.delta_scales if delta == "int8" else state.delta):
            assert_laid_out_alike(kept, params)


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


def check_shard_map():
    """Each device steps on its own shards; what is replicated counts once where JAX tracks it.

    Shards of a rounded Delta have blocks and random numbers of their own, so they follow one device within rounding.
    """
    shape, specs = LAYOUTS["over 8"]
    mesh, whole = mesh_of(shape), jax.tree.map(jnp.asarray, start())
    for delta in (None, "bfloat16", "int8"):
        optimizer = make(delta=delta, axis_name="a")
        of_state = optax.tree.map_params(
            optimizer, lambda _, spec: spec, optimizer.init(whole), specs, transform_non_params=lambda _: P()
        )

        init = (
            optimizer.init
            if delta is None
            else jax.shard_map(optimizer.init, mesh=mesh, in_specs=(specs,), out_specs=of_state)
        )
        state = jax.jit(init)(whole)

        def ten_steps(params, state, optimizer=optimizer):
            def once(carry, _):
                return apply(optimizer, grads, *carry), None

            grads = jax.tree.map(jnp.cos, params)
            return jax.lax.scan(once, (params, state), length=10)[0]

        mapped = jax.shard_map(ten_steps, mesh=mesh, in_specs=(specs, of_state), out_specs=(specs, of_state))
        compiled = jax.jit(mapped).lower(whole, state).compile()
        assert collectives(compiled) == ["all-reduce"]
        ended, expected = compiled(whole, state), on_one_device(delta)
        assert_same(ended, expected, 0.05 if delta else 1e-6)
        for name in SHAPES:
            assert np.linalg.norm(ended[0][name] - expected[0][name]) <= 0.05 * np.linalg.norm(expected[0][name]), name


def check_shard_map_without_tracking():
    """Then every shard counts as different, which holds where all parameters are cut."""
    mesh, x = mesh_of((8,)), jnp.asarray(start()["first"])

    def two_steps(optimizer, x, state):
        for _ in range(2):
            _, state = optimizer.update(jnp.cos(x), state, x)
        return scales(state)["default"]

    optimizer = mechanize(optax.sgd(1.0), axis_name="a")
    state = optimizer.init(x)
    of_state = optax.tree.map_params(optimizer, lambda _: P("a"), state, transform_non_params=lambda _: P())
    sharded = functools.partial(two_steps, optimizer)
    mapped = jax.shard_map(sharded, mesh=mesh, in_specs=(P("a"), of_state), out_specs=P(), check_vma=False)
    expected = jax.jit(functools.partial(two_steps, mechanize(optax.sgd(1.0))))(x, state)
    assert expected > 0
    np.testing.assert_allclose(jax.jit(mapped)(x, state), expected, rtol=1e-6)


def varying(tree, axis):
    if hasattr(jax.lax, "pcast"):  # since JAX 0.8.2
        return jax.lax.pcast(tree, axis, to="varying")
    return jax.lax.pvary(tree, axis)


def check_data_parallel_in_shard_map():
    """Every shard holds all parameters, so no axis is to be named."""
    mesh, optimizer = mesh_of((8,)), make(optax.adamw)

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
