"""mechanize(muon(1.0)): Muon for the matrices, AdamW for the rest, and no learning rates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx, traverse_util

from mechanic.jax import mechanize, muon, roles, scales
from tests.jax.task import same_bits

VOCABULARY, LENGTH, WIDTH = 17, 12, 16


def model(seed=0):
    """One layer of attention with a dimension for the heads, an MLP, and a head."""
    rng = np.random.default_rng(seed)

    def dense(*shape):
        return {"kernel": jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32)}

    return {
        "embed": jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), jnp.float32),
        "attention": {
            **{name: dense(WIDTH, 2, WIDTH // 2) for name in ("query", "key", "value")},
            "out": dense(2, WIDTH // 2, WIDTH),
        },
        "up": {**dense(WIDTH, 4 * WIDTH), "bias": jnp.zeros(4 * WIDTH)},
        "down": dense(4 * WIDTH, WIDTH),
        "norm": {"scale": jnp.ones(WIDTH)},
        "lm_head": dense(WIDTH, VOCABULARY),
    }


def tokens(step, size=16):
    """Sequences where each token follows from the one before it, but for one in ten."""
    rng = np.random.default_rng(step)
    found = rng.integers(0, VOCABULARY, (size, LENGTH + 1))
    noise = rng.random(found.shape) < 0.1
    for i in range(1, LENGTH + 1):
        found[:, i] = np.where(noise[:, i], found[:, i], (3 * found[:, i - 1] + 1) % VOCABULARY)
    return jnp.asarray(found)


def loss_of(params, batch):
    x = params["embed"][batch[:, :-1]]
    x = x * params["norm"]["scale"] / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
    query, key, value = (
        jnp.einsum("btd,dhk->bhtk", x, params["attention"][name]["kernel"]) for name in ("query", "key", "value")
    )
    scores = jnp.where(np.tri(LENGTH, dtype=bool), query @ key.swapaxes(-1, -2) / (WIDTH / 2) ** 0.5, -jnp.inf)
    x = x + jnp.einsum("bhtk,hkd->btd", jax.nn.softmax(scores) @ value, params["attention"]["out"]["kernel"])
    x = x + jax.nn.gelu(x @ params["up"]["kernel"] + params["up"]["bias"]) @ params["down"]["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(
        (x @ params["lm_head"]["kernel"]).astype(jnp.float32), batch[:, 1:]
    ).mean()


@pytest.mark.long
def test_it_trains_alike_with_every_learning_rate():
    """With a tuner for every role."""

    @jax.jit
    def end_at(lr, batches):
        schedule = optax.cosine_decay_schedule(lr, len(batches))
        optimizer = mechanize(muon(schedule), peak_lr=lr, schedule=schedule, labels=roles)

        def step(carry, batch):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss_of)(params, batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, state), _ = jax.lax.scan(step, (model(), optimizer.init(model())), batches)
        return loss_of(params, tokens(10_000, 256)), scales(state)

    losses, learned = zip(*(end_at(lr, jnp.stack([tokens(t) for t in range(40)])) for lr in (1e-4, 1e4)), strict=True)
    assert max(losses) < 1.2  # from 3; 0.6 is left by the noise
    assert max(losses) / min(losses) < 1.01
    assert sorted(learned[0]) == ["embedding", "head", "matrix", "vector"]


def test_parameters_have_the_roles_of_their_names_and_shapes():
    """tests/torch/test_roles.py has what is told by names alone."""
    found = roles(model())
    assert {kernel["kernel"] for kernel in found["attention"].values()} == {"matrix"}
    assert found["up"] == {"kernel": "matrix", "bias": "vector"}
    assert found["embed"] == "embedding"
    assert found["lm_head"] == {"kernel": "head"}
    shapes = {
        "qa_outputs/kernel": (4, 2),
        "head/kernel": (4, 1),
        "experts": (4, 3, 2),
        "conv/kernel": (3, 3, 2, 4),
        "unembed": (4, 9),
        "pos_emb": (9, 4),
        "pos_ffn/w": (4, 8),
        "odd": (2, 3, 4),
        "row": (1, 5),
        "query/bias": (2, 4),  # with a dimension for the heads
        "norms/scale": (3, 8),  # with one for the layers
    }
    leaves = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    found = traverse_util.flatten_dict(roles(traverse_util.unflatten_dict(leaves, sep="/")), sep="/")
    expected = ["head", "head", "experts", "conv", "head", "embedding", "matrix", "other", "vector", "vector", "vector"]
    assert [found[name] for name in leaves] == expected
    assert roles({"up": jnp.zeros((4, 4))}, {"u*": "head"}) == {"up": "head"}


@pytest.mark.long
def test_parameters_of_nnx_are_taken_as_those_of_a_dict_are():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, use_bias=False)
            self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)

    state = nnx.state(Network(nnx.Rngs(0)), nnx.Param)
    trees = nnx.to_pure_dict(state), state
    assert jax.tree.leaves(roles(trees[0])) == jax.tree.leaves(roles(trees[1]))
    updates = [jax.jit(muon(1.0).update)(tree, muon(1.0).init(tree), tree)[0] for tree in trees]
    assert same_bits(*map(jax.tree.leaves, updates))


def test_only_matrices_go_to_muon():
    state = muon(1.0).init(model())
    inner = state.inner_states["muon"].inner_state.inner_states["muon"].inner_state
    held = next(part for part in inner if isinstance(part, optax.contrib.MuonState))
    shapes = {leaf.shape for leaf in jax.tree.leaves(held.mu)}
    assert shapes == {(16, 2, 8), (2, 8, 16), (16, 64), (64, 16)}


@pytest.mark.long
def test_attention_is_orthogonal_as_one_matrix():
    """A dimension for the heads changes nothing but the shape."""
    params = model()
    flat = jax.tree.map(lambda p: p.reshape(p.shape[0], -1), {"query": params["attention"]["query"]})
    deep = {"query": params["attention"]["query"]}
    updates = [muon(1.0).update(tree, muon(1.0).init(tree), tree)[0]["query"]["kernel"] for tree in (deep, flat)]
    np.testing.assert_allclose(updates[0].reshape(updates[1].shape), updates[1], rtol=1e-5, atol=1e-6)


def test_what_is_not_known_is_refused_with_what_to_do():
    odd = {"table": jnp.ones((2, 3, 4)), "up": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match=r"not known: table; .*overrides=\{'table': 'vector'\}"):
        mechanize(muon(1.0)).init(odd)
    with pytest.raises(ValueError, match="table has 3 dimensions"):
        mechanize(muon(1.0, overrides={"table": "matrix"})).init(odd)
    with pytest.raises(ValueError, match="no parameter has a name that fits 'tabel'"):
        mechanize(muon(1.0, overrides={"tabel": "vector", "table": "vector"})).init(odd)
    with pytest.raises(ValueError, match="none of"):
        roles(odd, {"table": "vectors"})
    with pytest.raises(ValueError, match="fits 'tabel'"):
        roles(odd, {"tabel": "vector"})
    mechanize(muon(1.0, overrides={"table": "vector"})).init(odd)


def test_parts_of_matrices_are_refused():
    with pytest.raises(ValueError, match="use jit with sharded arrays"):
        mechanize(muon(1.0), axis_name="shards").init(model())
