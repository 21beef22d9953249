"""Everything that may happen to a Mechanic in PyTorch, in any order. Promises are checked after every operation."""

import copy
import functools

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from torch.optim import lr_scheduler

from mechanic.torch import Mechanic
from mechanic.torch.base import steps_one_by_one
from tests.campaign import torch_checks as checks
from tests.campaign import torch_prediction
from tests.campaign.hostile_checkpoints import HOSTILE
from tests.campaign.torch_bases import BY_NAME, CONFIGS
from tests.campaign.torch_checked import BeforeFailure, CheckedMachine, tuners_of
from tests.campaign.torch_training import MOST_PARAMETERS, InjectedError, Training, raising, random, saved

seeds = st.integers(0, 1000)
places = st.integers(0, MOST_PARAMETERS - 1)  # of a parameter or group, modulo how many there are

GROUPINGS = {
    "one tuner": ([{}], False),
    "two groups of one tuner": ([{}, {"lr": 0.5}], False),
    "named tuners": ([{"tuner": "a"}, {"tuner": "b"}, {}], False),
    "per group": ([{}, {}], True),
    "per group, one named": ([{}, {"tuner": "a"}], True),
}
SCHEDULERS = {
    "falls below zero": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 2),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 2.0, total_steps=9, cycle_momentum=False),
    "warm-up": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
}
FAILURES = ["before the first group", "before the first group", "after the first group", "after the last group"]
BAD = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan"), "1e30": 1e30}


class TorchMachine(CheckedMachine):
    @initialize(
        dtype=st.runner().flatmap(lambda machine: st.sampled_from(machine.base.dtypes)),
        config=st.sampled_from(["default", *CONFIGS]),
        grouping=st.sampled_from(list(GROUPINGS)),
        skip_nonfinite=st.booleans(),
        lr=st.sampled_from([1.0, 0.1, 3.0]),
        delta=st.sampled_from([None, torch.float32, torch.bfloat16, "int8"]),
        seed=seeds,
    )
    def build(self, dtype, config, grouping, skip_nonfinite, lr, delta, seed):
        groups, per_group = GROUPINGS[grouping]
        options = {
            "config": CONFIGS[config],
            "per_group": per_group,
            "skip_nonfinite": skip_nonfinite,
            "own_iterates": self.base.own_iterates,
            "delta": delta,
        }
        self.training = Training.start(self.base, dtype, copy.deepcopy(groups), lr, options, seed)
        self.start = checks.Start(self.training)
        self.rollback, self.removed = None, []
        self.is_observed, self.unobserved, self.is_in_eval_mode = False, set(), True
        self.ensure_training_mode()

    # Training.

    @rule(steps=st.integers(1, 6), seed=seeds, size=st.sampled_from([1.0, 1.0, 1e-3, 100.0]))
    def train(self, steps, seed, size):
        for step in range(steps):
            self.training.fill_gradients(seed + step, size=size)
            self.learn()

    @rule(seed=seeds)
    def train_with_closure(self, seed):
        def closure():
            self.training.fill_gradients(seed)
            return 2.5

        assert self.step(closure) == 2.5

    @precondition(lambda self: self.training.dtype == torch.float64 and self.is_observed is False)
    @rule(steps=st.integers(1, 3), seed=seeds, missing=st.sets(places, max_size=2))
    def train_as_predicted(self, steps, seed, missing):
        self.ensure_training_mode()
        for step in range(steps):
            self.training.fill_gradients(seed + step)
            for place in missing:
                self.parameter(place).grad = None
            prediction, sizes = torch_prediction.predict(self.training), checks.sizes(self.training)
            self.step()
            torch_prediction.check(self.training, prediction, sizes)

    @rule(steps=st.integers(1, 3), seed=seeds, missing=st.sets(places, min_size=1, max_size=2), zero=st.sets(places))
    def train_with_missing_gradients(self, steps, seed, missing, zero):
        for step in range(steps):
            self.training.fill_gradients(seed + step)
            for place, p in enumerate(self.training.params):
                if place in missing:
                    p.grad = None
                elif place in zero:
                    p.grad.zero_()
            self.step()

    @rule(set_to_none=st.sampled_from([None, True, False]))
    def train_on_cleared_gradients(self, set_to_none):
        self.optimizer.zero_grad(*([] if set_to_none is None else [set_to_none]))
        scales, has_feedback = self.optimizer.scales(), self.is_observed is not False
        self.step()
        assert has_feedback or self.optimizer.scales() == scales, "S moved without feedback"

    @rule(seed=seeds)
    def observe(self, seed):
        self.training.fill_gradients(seed)
        before = checks.all_bits(self.training)
        self.optimizer.observe()
        checks.assert_same(before, checks.all_bits(self.training), "observe()")
        assert all(p.grad is None for p in self.training.params)
        self.is_observed, self.unobserved = True, set()
        self.check()

    @precondition(lambda self: not self.bad_gradients_reach_the_base)
    @rule(kind=st.sampled_from(list(BAD)), everywhere=st.booleans(), place=places, seed=seeds)
    def train_on_bad_gradients(self, kind, everywhere, place, seed):
        self.training.fill_gradients(seed)
        for p in self.training.params if everywhere else [self.parameter(place)]:
            # As a tensor: torch 2.5 refuses a number that is too large for float16.
            p.grad.view(-1)[0] = torch.tensor(BAD[kind], dtype=torch.float64)
        self.step_on_bad_gradients()

    @precondition(lambda self: not self.bad_gradients_reach_the_base and self.base.takes_expanded_gradients)
    @rule(value=st.sampled_from([0.5, float("nan"), float("inf")]), place=places, seed=seeds)
    def train_on_a_gradient_of_stride_0(self, value, place, seed):
        self.training.fill_gradients(seed)
        p = self.parameter(place)
        p.grad = torch.tensor(value, dtype=p.dtype).expand(p.shape)
        self.step_on_bad_gradients()

    @rule(
        way=st.sampled_from(["hooks", "one by one"]),
        kind=st.sampled_from([None, None, *BAD]),
        place=places,
        seed=seeds,
    )
    def train_inside_the_backward_pass(self, way, kind, place, seed):
        self.ensure_training_mode()
        self.training.fill_gradients(seed)
        if self.training.options["skip_nonfinite"] or not steps_one_by_one(self.optimizer.base):
            self.must_refuse(self.optimizer.step_in_backward)
        elif self.is_observed is False and self.training.trains:
            step = functools.partial(self.training.step_inside_the_backward_pass, way)
            if kind and not self.bad_gradients_reach_the_base:
                self.parameter(place).grad.view(-1)[0] = torch.tensor(BAD[kind], dtype=torch.float64)
                self.step_on_bad_gradients(step)
            else:
                self.learn(step)
            assert all(p.grad is None for p in self.training.params if p.requires_grad)

    @precondition(lambda self: self.training.trains)
    @rule(when=st.sampled_from(FAILURES), seed=seeds)
    def base_raises(self, when, seed):
        self.ensure_training_mode()
        self.training.fill_gradients(seed)
        before = BeforeFailure(self.training)
        with raising(self.optimizer.base, when), pytest.raises(InjectedError):
            self.optimizer.step()
        before.check(self.training)
        self.is_observed = None
        self.check()

    @rule(kind=st.sampled_from(list(SCHEDULERS)), steps=st.integers(1, 5), seed=seeds)
    def train_with_scheduler(self, kind, steps, seed):
        scheduler = SCHEDULERS[kind](self.optimizer)
        for step in range(steps):
            self.training.fill_gradients(seed + step)
            self.step()
            scheduler.step()

    @rule(lr=st.sampled_from([0.0, -0.1, 0.5, 1.0, 2.0]), place=places, everywhere=st.booleans())
    def set_lr(self, lr, place, everywhere):
        groups = self.optimizer.param_groups
        for group in groups if everywhere else [groups[place % len(groups)]]:
            group["lr"] = lr
        self.check()

    # What others do to the parameters.

    @rule(place=places, trainable=st.booleans())
    def freeze_or_thaw_a_layer(self, place, trainable):
        self.parameter(place).requires_grad_(trainable)
        self.check()

    @rule(place=places, kind=st.sampled_from(["add", "set", "clamp"]), seed=seeds)
    def write_to_a_parameter(self, place, kind, seed):
        p = self.parameter(place)
        noise = random(p.shape, p.dtype, torch.Generator().manual_seed(seed))
        with torch.no_grad():
            if kind == "add":
                p.add_(noise)
            elif kind == "set" or p.is_complex():
                p.copy_(noise)
            else:
                p.clamp_(-1, 1)
        self.start = checks.Start(self.training)
        self.check()

    @precondition(lambda self: self.base.own_iterates and not self.is_in_eval_mode)
    @rule()
    def go_to_eval_mode(self):
        self.optimizer.eval()
        self.is_in_eval_mode = True
        self.check()

    # Copies.

    @rule(seed=seeds, go_on_with_copy=st.booleans())
    def save_and_load(self, seed, go_on_with_copy):
        twin = self.training.copied_by_state_dict()
        self.optimizer.load_state_dict(saved(self.optimizer.state_dict()))  # drops an observation here as well
        self.is_observed = False
        self.continue_alike(twin, seed, go_on_with_copy)

    @precondition(lambda self: self.base.can_be_copied)
    @rule(way=st.sampled_from(["deepcopy", "pickle"]), seed=seeds, go_on_with_copy=st.booleans())
    def copy_all(self, way, seed, go_on_with_copy):
        twin = self.training.copied_by_deepcopy() if way == "deepcopy" else self.training.copied_by_pickle()
        self.continue_alike(twin, seed, go_on_with_copy)

    @rule()
    def save(self):
        values = [p.detach().clone() for p in self.training.params]
        self.rollback = values, saved(self.optimizer.state_dict()), self.is_in_eval_mode

    @precondition(lambda self: self.rollback is not None)
    @rule()
    def roll_back(self):
        values, state_dict, self.is_in_eval_mode = self.rollback
        self.optimizer.load_state_dict(copy.deepcopy(state_dict))
        with torch.no_grad():
            for p, value in zip(self.training.params, values, strict=True):
                p.copy_(value)
        self.is_observed = False
        self.start = checks.Start(self.training)
        self.check()

    @precondition(lambda self: not self.base.own_iterates)
    @rule()
    def load_checkpoint_of_bare_base(self):
        state_dict = self.training.state_dict_of_bare_base()
        values = checks.bits(self.training.params)
        with pytest.warns(UserWarning, match="fresh tuner"):
            self.optimizer.load_state_dict(state_dict)
        assert checks.bits(self.training.params) == values
        assert not any(self.optimizer.scales().values())
        self.is_observed = False
        self.start = checks.Start(self.training)
        self.check()

    @rule(kind=st.sampled_from(list(HOSTILE)))
    def load_hostile_checkpoint(self, kind):
        state_dict = saved(self.optimizer.state_dict())
        if HOSTILE[kind](state_dict):
            self.must_refuse(lambda: self.optimizer.load_state_dict(state_dict), kinds=ValueError)

    @rule(seed=seeds)
    def load_checkpoint_of_another_base(self, seed):
        other = BY_NAME["SGD momentum" if self.base.cls is torch.optim.AdamW else "AdamW"]
        if self.base.own_iterates:
            return
        twin = self.training.with_base(other)
        twin.fill_gradients(seed)
        twin.optimizer.step()
        state_dict = saved(twin.optimizer.state_dict())
        self.must_refuse(lambda: self.optimizer.load_state_dict(state_dict), kinds=ValueError)

    # Param groups.

    @precondition(lambda self: len(self.training.params) < MOST_PARAMETERS)
    @rule(tuner=st.sampled_from([None, "a", "new"]), lr=st.sampled_from([None, 0.5]), again=st.booleans(), seed=seeds)
    def add_group(self, tuner, lr, again, seed):
        p = self.removed.pop() if again and self.removed else self.training.new_parameter(seed)
        options = {"tuner": tuner, "lr": lr}
        group = {"params": [p], **{key: value for key, value in options.items() if value is not None}}
        if self.optimizer.is_frozen and tuner not in self.training.tuners():
            self.must_refuse(lambda: self.optimizer.add_param_group(group), match="frozen")
            return
        former_rows = set(tuners_of(self.training))
        self.optimizer.add_param_group(group)
        self.training.params.append(p)
        if self.optimizer.param_groups[-1]["mechanic_row"] not in former_rows:
            self.unobserved.add(self.optimizer.param_groups[-1]["mechanic_row"])
        self.forget_structure()
        if self.base.own_iterates and not self.is_in_eval_mode:
            self.optimizer.train()  # Schedule-Free wants it for the new group
        self.check()

    @rule(kind=st.sampled_from(["lr = 0", "a parameter twice", "no dict"]), seed=seeds)
    def add_refused_group(self, kind, seed):
        group = {
            "lr = 0": {"params": [self.training.new_parameter(seed)], "lr": 0.0, "tuner": "zero"},
            "a parameter twice": {"params": [self.training.new_parameter(seed), self.parameter(seed)]},
            "no dict": [self.parameter(seed)],
        }[kind]
        self.must_refuse(lambda: self.optimizer.add_param_group(group))

    @precondition(lambda self: len(self.optimizer.param_groups) > 1)
    @rule(place=places)
    def remove_group(self, place):
        groups = self.optimizer.param_groups
        group = groups[place % len(groups)]
        sharing = [g for g in groups if g is not group and g.get("mechanic_row") == group.get("mechanic_row")]
        if sharing and not any(self.optimizer.state.get(p) for g in sharing for p in g["params"]):
            return  # the checkpoint of a tuner that has learned, but has no parameter with state, is refused
        del groups[place % len(groups)]  # remove() would compare tensors
        for p in group["params"]:
            self.optimizer.state.pop(p, None)
        self.removed = group["params"]
        self.unobserved.discard(group["mechanic_row"])
        gone = self.training.indices(group)
        self.training.params = [p for i, p in enumerate(self.training.params) if i not in gone]
        self.forget_structure()
        self.check()

    @rule()
    def wrap_again(self):
        self.must_refuse(lambda: Mechanic(self.optimizer))
        self.must_refuse(lambda: Mechanic(self.optimizer.base))

    # Keeping what was learned.

    @rule()
    def freeze(self):
        if self.base.own_iterates:
            self.must_refuse(self.optimizer.freeze, match="iterates of its own", kinds=TypeError)
        elif not all(self.optimizer.scales().values()):
            self.must_refuse(self.optimizer.freeze, match="nothing has been learned", kinds=ValueError)
        else:
            values, learned = checks.bits(self.training.params), self.optimizer.learned_rates()
            self.optimizer.freeze()
            assert checks.bits(self.training.params) == values
            assert self.optimizer.scales() == pytest.approx(learned, rel=1e-6)
            assert not any(
                str(key).startswith(checks.DELTA) for state in self.optimizer.state.values() for key in state
            )
            self.start = checks.Start(self.training)
            self.check()

    @rule(seed=seeds)
    def release(self, seed):
        if self.base.own_iterates or not self.base.is_linear_in_lr:
            self.must_refuse(self.optimizer.release, kinds=TypeError)
            return
        if not all(self.optimizer.scales().values()):
            self.must_refuse(self.optimizer.release, match="nothing has been learned", kinds=ValueError)
            return
        self.ensure_training_mode()
        self.training.release_and_train(seed)
        self.training.wrap_released()
        self.is_observed = False
        self.forget_structure()
        self.check()

    def forget_structure(self):
        """After the param groups have changed."""
        self.rollback = None
        self.start = checks.Start(self.training)


def machine_for(base):
    name = "".join(word.capitalize() for word in base.name.split()) + "Machine"
    return type(name, (TorchMachine,), {"base": base})
