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


@pytest.mark.parametrize("first", [jnp.float32, jnp.bfloat16])
def test_parameters_that_were_cast_since_init_are_named(first):
    dtypes = {jnp.float32, jnp.bfloat16}
    (other,) = dtypes - {first}
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3, first)}
    optimizer = mechanize(optax.sgd(1.0))
    state = optimizer.init(params)
    cast = {**params, "b": params["b"].astype(other)}
    was = "in" if first == jnp.bfloat16 else "not in"
    with pytest.raises(ValueError, match=rf"\['b'\] is {jnp.dtype(other)}, but it was {was} half precision"):
        optimizer.update(cast, state, cast)


def test_a_schedule_is_a_function():
    with pytest.raises(TypeError, match=r"schedule must be .* a function of the step, got 0\.001"):
        mechanize(optax.sgd(1e-3), schedule=1e-3)


@pytest.mark.skipif(not hasattr(optax.contrib, "madgrad"), reason="Optax has it from 0.2.7 on")
def test_madgrad_keeps_iterates_of_its_own():
    with pytest.raises(TypeError, match="a MadgradState: it keeps iterates of its own"):
        mechanize(optax.contrib.madgrad(1.0)).init(jnp.ones(3))


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [float, np.float32, np.asarray, jnp.asarray])
def test_a_peak_that_is_no_learning_rate_is_refused_where_its_value_is_known(kind, bad):
    with pytest.raises(ValueError, match="peak_lr must be a positive learning rate, got"):
        mechanize(optax.sgd(1.0), peak_lr=kind(bad))
    with pytest.raises(ValueError, match="peak_lr must be a positive learning rate, got"):
        optax.inject_hyperparams(mechanize)(optax.sgd(1.0), peak_lr=kind(bad)).init(jnp.ones(2))


def test_a_peak_is_one_number():
    for wrong in (jnp.ones(2), "1.0", None, 1j):
        with pytest.raises(ValueError, match="peak_lr must be a positive learning rate, got"):
            mechanize(optax.sgd(1.0), peak_lr=wrong)
    with pytest.raises(ValueError, match="peak_lr must be a positive learning rate, got"):
        jax.eval_shape(lambda peak: mechanize(optax.sgd(1.0), peak_lr=peak).init(peak), jnp.ones(2))


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
    with pytest.raises(ValueError, match=r"labels must be a prefix of the parameters(.|\n)*body"):
        mechanize(optax.sgd(1.0), labels={"bias": "a"}).init(PARAMS)


PARAMS = {"body": [{"weight": jnp.ones((3, 2))}], "bias": jnp.ones(3)}
WEIGHT = r"\['body'\]\[0\]\['weight'\]"


def with_weight(leaf):
    return {**PARAMS, "body": [{"weight": leaf}]}


def step(grads=PARAMS, state=None, params=PARAMS, base=None, **extra):
    """One jitted step after an ordinary init."""
    optimizer = mechanize(base or optax.adamw(1.0))
    return jax.jit(optimizer.update)(grads, state or optimizer.init(PARAMS), params, **extra)


def test_a_parameter_that_has_changed_its_shape_is_named():
    longer = with_weight(jnp.ones((5, 2)))
    with pytest.raises(
        ValueError, match=rf"^{WEIGHT} has shape \(5, 2\).*\(3, 2\) when the state was made.*optimizer\.init"
    ):
        step(longer, params=longer)


def test_parameters_that_have_changed_their_tree_are_explained():
    for other, difference in (
        ({"bias": jnp.ones(3)}, rf"{WEIGHT} is only in the state"),
        ({**PARAMS, "body": jnp.ones(3)}, r"\['body'\] is only in the parameters"),
        ({**PARAMS, "bias": None}, r"\['bias'\] is only in the state"),
        ({**PARAMS, "body": tuple(PARAMS["body"])}, "containers are of other types"),
    ):
        with pytest.raises(
            ValueError, match=rf"the state was made for other parameters: .*{difference}.*optimizer\.init"
        ):
            step(other, params=other)


@pytest.mark.parametrize("given", ["gradients", "observed"])
def test_gradients_that_do_not_fit_are_named(given):
    def give(wrong):
        return step(wrong) if given == "gradients" else step(observed=wrong)

    what = {"gradients": "gradient", "observed": "observed gradient"}[given]
    for shape in ((), (1,), (2, 3), (3, 1), (5, 2)):
        with pytest.raises(ValueError, match=rf"the {what} of {WEIGHT} has shape .*, the parameter \(3, 2\)"):
            give(with_weight(jnp.ones(shape)))
    with pytest.raises(ValueError, match=rf"the {what} of {WEIGHT} is None; pass zeros.*freeze_mask"):
        give(with_weight(None))
    with pytest.raises(ValueError, match=rf"the {what}s must be a tree like the parameters"):
        give({"bias": jnp.ones(3)})
    with pytest.raises(TypeError, match=rf"the {what} of {WEIGHT} is a dict"):
        give(with_weight({"inner": jnp.ones((3, 2))}))


def test_a_base_whose_updates_do_not_fit_is_explained():
    summed = optax.stateless(lambda updates, params: jax.tree.map(jnp.sum, updates))
    with pytest.raises(ValueError, match=r"the base's update of \['bias'\] has shape \(\), the parameter \(3,\)"):
        step(base=summed)


@pytest.mark.parametrize(
    "dtype", [jnp.int32, jnp.int8, jnp.uint8, bool, jnp.float8_e4m3fn, jnp.float8_e5m2], ids=lambda d: jnp.dtype(d).name
)
def test_a_parameter_of_a_dtype_that_cannot_be_trained_is_named(dtype):
    wrong = with_weight(jnp.ones((3, 2), dtype))
    message = (
        rf"{WEIGHT} is {jnp.dtype(dtype).name}; .*optax\.selective_transform\(mechanize\(base\), freeze_mask=mask\)"
    )
    with pytest.raises(TypeError, match=message):
        mechanize(optax.adamw(1.0)).init(wrong)
    with pytest.raises(TypeError, match=message):
        step(params=wrong)
    with pytest.raises(TypeError, match="the parameter is"):
        mechanize(optax.adamw(1.0)).init(jnp.ones(2, dtype))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn], ids=lambda d: jnp.dtype(d).name)
def test_such_a_parameter_can_stand_beside_others_as_the_message_says(dtype):
    params = with_weight(jnp.ones((3, 2), dtype))
    mask = {"body": True, "bias": False}
    optimizer = optax.selective_transform(mechanize(optax.adamw(1.0)), freeze_mask=mask)
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = jax.jit(optimizer.update)(params, state, params)
        moved = optax.apply_updates(params, updates)
    assert moved["body"][0]["weight"].dtype == dtype
    assert (moved["body"][0]["weight"] == params["body"][0]["weight"]).all()
    assert (moved["bias"] < params["bias"]).all()


def test_the_state_of_another_transformation_is_refused():
    with pytest.raises(
        TypeError, match=r"got the state of another transformation, a tuple; .*optimizer\.init\(params\)"
    ):
        step(state=optax.adam(1.0).init(PARAMS))
