"""What cannot work is refused, with what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from mechanic import TunerConfig
from mechanic.jax import mechanize
from tests.jax.task import PLAIN, mover

OWN_STEPS, OWN_ITERATES = "it chooses the size of its own steps", "it keeps iterates of its own"
BASES = {
    "Prodigy": (optax.contrib.prodigy(), f"ProdigyState: {OWN_STEPS}"),
    "Optax's mechanize": (optax.contrib.mechanize(optax.sgd(1.0)), f"MechanicState: {OWN_STEPS}"),
    "ours": (PLAIN, f"MechanicState: {OWN_STEPS}"),
    "DoG in a chain": (optax.chain(optax.clip(1.0), optax.contrib.dog()), f"DoGState: {OWN_STEPS}"),
    "a line search": (optax.lbfgs(), f"LinesearchState: {OWN_STEPS}"),
    "Schedule-Free": (optax.contrib.schedule_free_sgd(), f"ScheduleFreeState: {OWN_ITERATES}"),
    "MADGRAD": (optax.contrib.madgrad(1.0), f"MadgradState: {OWN_ITERATES}"),
}


@pytest.mark.parametrize("name", BASES)
def test_bases_that_make_no_sense_are_refused(name):
    base, why = BASES[name]
    with pytest.raises(TypeError, match=rf"mechanize cannot wrap a base that holds a \w*{why}"):
        mechanize(base).init(jnp.ones(3))


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf")])
def test_a_peak_that_is_no_learning_rate_is_refused_where_its_value_is_known(bad):
    for kind in (float, np.float32, np.asarray, jnp.asarray):
        for build in (mechanize, lambda base, **peak: optax.inject_hyperparams(mechanize)(base, **peak).init(1.0)):
            with pytest.raises(ValueError, match="peak_lr must be a positive learning rate, got"):
                build(optax.sgd(1.0), peak_lr=kind(bad))


def test_a_peak_is_one_number():
    for wrong in (jnp.ones(2), "1.0", 1j):
        with pytest.raises(ValueError, match="peak_lr must be a positive learning rate, got"):
            mechanize(optax.sgd(1.0), peak_lr=wrong)
    with pytest.raises(ValueError, match="peak_lr must be a positive learning rate, got"):
        jax.eval_shape(lambda peak: mechanize(optax.sgd(1.0), peak_lr=peak).init(peak), jnp.ones(2))


def test_wrong_arguments_are_explained():
    with pytest.raises(TypeError, match=r"got <function sgd .*write mechanize\(optax\.adamw\(1\.0\)\)"):
        mechanize(optax.sgd)
    with pytest.raises(TypeError, match="no field lamda"):
        mechanize(optax.sgd(1.0), config={"lamda": 1.0})
    with pytest.raises(TypeError, match=r"schedule must be .* a function of the step, got 0\.001"):
        mechanize(optax.sgd(1e-3), schedule=1e-3)
    with pytest.raises(ValueError, match=r"labels must have a name for every part .* have none for \['body'\]"):
        mechanize(optax.sgd(1.0), labels={"bias": "a"}).init(PARAMS)
    optimizer = mechanize(optax.sgd(1.0), config=TunerConfig.paper())
    state = optimizer.init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"write optimizer\.update\(grads, state, params\)"):
        optimizer.update(jnp.ones(2), state)
    with pytest.raises(ValueError, match=r"named \['default'\], the labels name \['a'\]"):
        mechanize(optax.sgd(1.0), labels="a").update(jnp.ones(2), state, jnp.ones(2))
    with pytest.raises(ValueError, match="the state has 6 scales per tuner, the config 1 betas"):
        mechanize(optax.sgd(1.0), config={"betas": (0.9,)}).update(jnp.ones(2), state, jnp.ones(2))


PARAMS = {"body": [{"weight": jnp.ones((3, 2))}], "bias": jnp.ones(3)}
WEIGHT = r"\['body'\]\[0\]\['weight'\]"


def with_weight(leaf):
    return {**PARAMS, "body": [{"weight": leaf}]}


def step(grads=PARAMS, state=None, params=PARAMS, base=None, **extra):
    """One jitted step after an ordinary init."""
    optimizer = mechanize(base or optax.adamw(1.0))
    return jax.jit(optimizer.update)(grads, state or optimizer.init(PARAMS), params, **extra)


def test_parameters_that_have_changed_since_init_are_named():
    made_anew = r"optimizer\.init\(params\) makes one for these"
    longer = with_weight(jnp.ones((5, 2)))
    with pytest.raises(ValueError, match=rf"{WEIGHT} was \(3, 2\), and is \(5, 2\).*{made_anew}"):
        step(longer, params=longer)
    for other, difference in (
        ({"bias": jnp.ones(3)}, rf"{WEIGHT} was \(3, 2\), and is not there"),
        ({**PARAMS, "body": jnp.ones(3)}, r"\['body'\] was not there, and is \(3,\)"),
        ({**PARAMS, "bias": None}, r"\['bias'\] was \(3,\), and is not there"),
        ({**PARAMS, "body": tuple(PARAMS["body"])}, "containers are of other types"),
    ):
        with pytest.raises(ValueError, match=rf"made for other parameters: .*{difference}.*{made_anew}"):
            step(other, params=other)
    cast = with_weight(jnp.ones((3, 2), jnp.bfloat16))
    with pytest.raises(ValueError, match=rf"{WEIGHT} was \(3, 2\), and is \(3, 2\) in half precision"):
        step(cast, params=cast)
    state = mechanize(optax.adamw(1.0)).init({**cast, "bias": jnp.ones(3, jnp.float16)})
    with pytest.raises(ValueError, match=rf"{WEIGHT} was \(3, 2\) in half precision, and is \(3, 2\);"):
        step(state=state, params={**PARAMS, "bias": jnp.ones(3, jnp.float16)})
    with pytest.raises(TypeError, match=rf"got the state of another transformation, a tuple; .*{made_anew}"):
        step(state=optax.adam(1.0).init(PARAMS))


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
    wrong, leave_out = (
        with_weight(jnp.ones((3, 2), dtype)),
        r"optax\.selective_transform\(mechanize\(base\), freeze_mask",
    )
    for use in (mechanize(optax.adamw(1.0)).init, lambda params: step(params=params)):
        with pytest.raises(TypeError, match=rf"{WEIGHT} is {jnp.dtype(dtype).name}; .*{leave_out}=mask\)"):
            use(wrong)
    with pytest.raises(TypeError, match="the parameter is"):
        mechanize(optax.adamw(1.0)).init(jnp.ones(2, dtype))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn], ids=lambda d: jnp.dtype(d).name)
def test_such_a_parameter_can_stand_beside_others_as_the_message_says(dtype):
    params = with_weight(jnp.ones((3, 2), dtype))
    optimizer = optax.selective_transform(PLAIN, freeze_mask={"body": True, "bias": False})
    state, moved = optimizer.init(params), params
    for _ in range(3):
        moved, state = mover(optimizer)(params, state, moved)
    assert moved["body"][0]["weight"].dtype == dtype
    assert (moved["body"][0]["weight"] == params["body"][0]["weight"]).all()
    assert (moved["bias"] < params["bias"]).all()
