"""Everything that may happen to mechanic.jax, in any order. Promises are checked after every operation."""

import contextlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mechanic.jax import freeze, learned_rates, release, scales
from tests.campaign import jax_checks as checks
from tests.campaign.jax_setups import LABELS, Setup

seeds = st.integers(0, 1000)
names = st.sampled_from(sorted(LABELS))
BAD = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan, "1e30": 1e30}
GRADIENT_LIMIT = 10.0


class JaxMachine(RuleBasedStateMachine):
    setup: Setup  # set by machine_for
    operations = 0  # of all runs

    def __init__(self):
        super().__init__()
        self.contexts = contextlib.ExitStack()
        self.contexts.enter_context(jax.enable_x64(self.setup.x64))

    def teardown(self):
        self.contexts.close()

    @property
    def is_frozen(self):
        return self.state.delta is None

    @initialize(seed=seeds)
    def build(self, seed):
        rng = np.random.default_rng(seed)
        self.params = {
            "first": checks.random(rng, (3,), self.setup.dtype),
            "last": checks.random(rng, (2, 2), self.setup.dtype),
        }
        self.state = self.setup.init(self.params)
        self.steps = 0  # the base's count
        self.start = checks.Start(self.params, self.state, self.setup)
        self.check()

    def check(self):
        """Count an operation, and check what must hold after each."""
        type(self).operations += 1
        checks.check_finite(self.params, self.state)
        checks.check_scales(self.state, self.setup)
        self.start.check(self.params, self.state, self.setup)

    def gradients(self, seed, size=1.0):
        """Those of a quadratic whose minimum is at 1.5, with noise."""
        rng = np.random.default_rng(seed)
        grads = {}
        for name, p in self.params.items():
            slope = checks.wide(p) - 1.5
            slope *= GRADIENT_LIMIT / np.maximum(np.abs(slope), GRADIENT_LIMIT)
            grads[name] = size * (slope + 0.1 * rng.normal(size=slope.shape))
        return self.cast(grads)

    def cast(self, grads):
        with np.errstate(over="ignore"):
            return {name: np.asarray(g).astype(self.setup.dtype) for name, g in grads.items()}

    def step(self, grads, observed=None):
        former = self.params, self.state
        self.params, self.state = self.setup.step(self.params, self.state, grads, observed)
        checks.check_same_types(former, (self.params, self.state))
        if self.setup.schedule is not None:
            rate = float(self.setup.schedule(self.steps))
            assert rate > 0 or checks.same_bits(scales(former[1]), scales(self.state)), f"S moved at a rate of {rate}"
            assert rate != 0 or checks.same_values(former[0], self.params), "parameters moved at a learning rate of 0"
        self.steps += 1
        self.check()

    def learn(self, grads):
        """A step with finite gradients must teach every tuner something."""
        former = self.state.tuner
        self.step(grads)
        if not self.is_frozen:
            assert (np.asarray(self.state.tuner.steps) == np.asarray(former.steps) + 1).all(), "no tuner may ignore it"

    # Training.

    @rule(steps=st.integers(1, 6), seed=seeds, size=st.sampled_from([1.0, 1.0, 1e-3, 100.0]))
    def train(self, steps, seed, size):
        for step in range(steps):
            self.learn(self.gradients(seed + step, size))

    @precondition(lambda self: self.setup.dtype != jnp.float16)  # has no such numbers
    @rule(steps=st.integers(1, 4), seed=seeds, exponent=st.integers(7, 12))
    def train_on_huge_gradients(self, steps, seed, exponent):
        for step in range(steps):
            self.learn(self.gradients(seed + step, 10.0**exponent))

    @precondition(lambda self: not self.is_frozen)
    @rule()
    def train_on_zero_gradients(self):
        scale = scales(self.state)
        self.step(jax.tree.map(np.zeros_like, self.gradients(0)))
        assert checks.same_bits(scale, scales(self.state)), "S moved without feedback"

    @precondition(lambda self: not self.is_frozen)
    @rule(kind=st.sampled_from(list(BAD)), everywhere=st.booleans(), name=names, seed=seeds)
    def train_on_bad_gradients(self, kind, everywhere, name, seed):
        grads, hit = self.gradients(seed), set(LABELS) if everywhere else {name}
        for each in hit:
            grads[each].flat[0] = self.cast({each: BAD[kind]})[each]
        tuner = self.state.tuner
        self.step(grads)
        if kind != "1e30" or not self.setup.x64:  # else it is a number like any other
            for row, parts in enumerate(self.setup.rows):
                unmoved = checks.same_bits(*(checks.without_counts(each, row) for each in (tuner, self.state.tuner)))
                assert unmoved or not parts & hit, "the tuner moved by gradients that are not finite"

    @rule(seed=seeds, size=st.sampled_from([1.0, 1e9]))
    def train_observed(self, seed, size):
        self.step(self.gradients(seed), self.gradients(seed + 1, size))

    @precondition(lambda self: not self.is_frozen)
    @rule(kind=st.sampled_from(["inf", "-inf", "nan"]), seed=seeds)
    def train_with_a_bad_observation(self, kind, seed):
        observed = self.gradients(seed + 1)
        for leaf in observed.values():
            leaf.flat[0] = BAD[kind]
        scale = scales(self.state)
        self.step(self.gradients(seed), observed)
        assert checks.same_bits(scale, scales(self.state)), "a bad observation moved S"

    @precondition(lambda self: self.setup.x64 and not self.is_frozen)
    @rule(seed=seeds)
    def train_as_predicted(self, seed):
        grads = self.gradients(seed)
        prediction = checks.predict(self.params, self.state, grads, self.setup)
        self.step(grads)
        checks.check_prediction(prediction, self.params, self.state)

    @precondition(lambda self: self.setup.name == "sgd")
    @rule(seed=seeds)
    def train_with_and_without_jit(self, seed):
        grads = self.gradients(seed)
        params, state = self.setup.step_without_jit(self.params, self.state, grads)
        self.step(grads)
        checks.check_close(params, self.params)
        checks.check_close(scales(state), scales(self.state))

    @rule(name=names, seed=seeds)
    def write_to_a_parameter(self, name, seed):
        rng = np.random.default_rng(seed)
        self.params = {**self.params, name: checks.random(rng, self.params[name].shape, self.setup.dtype)}
        self.start = checks.Start(self.params, self.state, self.setup)
        self.check()

    # Copies.

    @rule(way=st.sampled_from(["numpy", "pickle"]), seed=seeds)
    def copy_all(self, way, seed):
        params, state = jax.tree.map(np.asarray, (self.params, self.state))
        if way == "pickle":
            params, state = pickle.loads(pickle.dumps((params, state)))
        grads = self.gradients(seed)
        params, state = self.setup.step(*jax.tree.map(jnp.asarray, (params, state)), grads, None)
        self.step(grads)
        assert checks.same_bits((params, state), (self.params, self.state)), "a copy goes on differently"

    # Refusals.

    @rule(seed=seeds)
    def refuse(self, seed):
        grads, update = self.gradients(seed), self.setup.optimizer.update
        with pytest.raises(ValueError, match="needs the parameters"):
            update(grads, self.state)
        other = self.state._replace(scale={"x": next(iter(self.state.scale.values()))})
        with pytest.raises(ValueError, match="tuners named"):
            update(grads, other, self.params)
        self.check()

    # Keeping what was learned.

    def is_refused_before_anything_was_learned(self, call):
        if all(scale > 0 for scale in scales(self.state).values()):
            return False
        with pytest.raises(ValueError, match="nothing has been learned"):
            call()
        return True

    @rule()
    def freeze(self):
        if self.is_refused_before_anything_was_learned(lambda: freeze(self.state)):
            return
        former, self.state = self.state, freeze(self.state)
        assert self.state.delta is None
        checks.check_close(learned_rates(former), scales(self.state))
        self.start = checks.Start(self.params, self.state, self.setup)
        self.check()

    @rule(seed=seeds)
    def release(self, seed):
        setup = self.setup

        def hand_over():
            return release(setup.base, self.state, labels=setup.labels)

        if self.is_refused_before_anything_was_learned(hand_over):
            return
        grads = self.gradients(seed)
        plain, plain_state = hand_over()
        if checks.is_half_precision(setup.dtype):  # whose rounding the bare base does not keep
            plain.update(checks.widened(grads), plain_state, checks.widened(self.params))
        else:
            updates, _ = plain.update(grads, plain_state, self.params)
            params, _ = setup.step(self.params, freeze(self.state), grads, None)
            checks.check_close(optax.apply_updates(self.params, updates), params)
        self.build(seed)


def machine_for(setup):
    name = "Jax" + "".join(word.capitalize() for word in setup.name.replace(",", "").split()) + "Machine"
    return type(name, (JaxMachine,), {"setup": setup})
