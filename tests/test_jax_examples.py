"""The examples in JAX run as they stand and learn; what they save resumes bit for bit."""

import importlib
import sys
from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import jax_nnx
from jax_task import mlp, same_bits, stepper, train
from mechanic.jax import mechanize


@pytest.mark.parametrize("name", ["jax_optax", "jax_nnx", "jax_equinox"])
def test_runs_as_it_stands_and_learns(name):
    assert importlib.import_module(name).main() < 0.15


def test_nnx_resumes_from_orbax_bit_for_bit(tmp_path):
    def bits(model, optimizer):
        return nnx.to_pure_dict(nnx.state((model, optimizer)))

    model, optimizer = jax_nnx.build()
    jax_nnx.train(model, optimizer, range(20))
    jax_nnx.save(tmp_path / "half", model, optimizer)
    loss = jax_nnx.train(model, optimizer, range(20, 40))
    again, its_optimizer = jax_nnx.build()
    jax_nnx.restore(tmp_path / "half", again, its_optimizer)
    assert jax_nnx.train(again, its_optimizer, range(20, 40)) == loss
    assert same_bits(bits(again, its_optimizer), bits(model, optimizer))


def test_a_whole_state_resumes_from_orbax_bit_for_bit(tmp_path):
    """As pytrees, through a chain, with half-precision parameters."""
    params = mlp(dtype="bfloat16")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), mechanize(optax.adamw(1.0)))
    step = stepper(optimizer)
    params, state = train(params, optimizer, 20, step=step)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
    with ocp.StandardCheckpointer() as checkpointer:
        like = jax.eval_shape(lambda: (mlp(dtype="bfloat16"), optimizer.init(mlp(dtype="bfloat16"))))
        like = jax.tree.map(
            lambda a, b: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=b.sharding), like, (params, state)
        )
        restored = checkpointer.restore(tmp_path / "state", like)
    assert same_bits(restored, (params, state))
    resumed = train(restored[0], optimizer, 20, state=restored[1], first=20, step=step)
    assert same_bits(resumed, train(params, optimizer, 20, state=state, first=20, step=step))
