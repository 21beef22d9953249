"""The examples in JAX run as they stand and learn; what they save resumes bit for bit."""

import importlib
import sys
from pathlib import Path

import pytest
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import jax_nnx
from tests.jax.task import same_bits

pytestmark = pytest.mark.long


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
