"""What cannot work is refused, with what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from mechanic import TunerConfig
from mechanic.jax import mechanize


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


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [float, np.float32, np.asarray, jnp.asarray])
def test_a_unit_that_is_no_learning_rate_is_refused_where_its_value_is_known(kind, bad):
    with pytest.raises(ValueError, match="unit must be a positive learning rate, got"):
        mechanize(optax.sgd(1.0), unit=kind(bad))
    with pytest.raises(ValueError, match="unit must be a positive learning rate, got"):
        optax.inject_hyperparams(mechanize)(optax.sgd(1.0), unit=kind(bad)).init(jnp.ones(2))


def test_a_unit_is_one_number():
    for wrong in (jnp.ones(2), "1.0", None, 1j):
        with pytest.raises(ValueError, match="unit must be a positive learning rate, got"):
            mechanize(optax.sgd(1.0), unit=wrong)
    with pytest.raises(ValueError, match="unit must be a positive learning rate, got"):
        jax.eval_shape(lambda unit: mechanize(optax.sgd(1.0), unit=unit).init(unit), jnp.ones(2))


def test_wrong_arguments_are_explained():
    with pytest.raises(TypeError, match=r"got <function sgd .*write mechanize\(optax\.adamw\(1\.0\)\)"):
        mechanize(optax.sgd)
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
