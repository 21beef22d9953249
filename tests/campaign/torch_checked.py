"""What the rules of the machine are made of: operations with their promises checked."""

import contextlib
import warnings

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from mechanic.tuner import TunerState
from tests.campaign import torch_checks as checks
from tests.campaign.torch_bases import Base
from tests.campaign.torch_training import Training

REFUSALS = ValueError, TypeError, RuntimeError

# Of schedulers in mid-training, and of many bad gradients or none. All are common here, and rightly warned of.
EXPECTED_WARNINGS = (
    "a scheduler starts from a learning rate",
    ".* steps so far had NaN or inf gradients",
    "no parameter of this optimizer has had a gradient",
)


class CheckedMachine(RuleBasedStateMachine):
    base: Base  # set by machine_for
    operations = 0  # of all runs

    training: Training
    start: checks.Start
    is_observed: bool | None  # whether the next step has an observation; None where that is not promised
    unobserved: set[int]  # rows of tuners that were added after the observation
    is_in_eval_mode: bool

    def __init__(self):
        super().__init__()
        self.contexts = contextlib.ExitStack()
        self.contexts.enter_context(warnings.catch_warnings())
        for expected in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", expected)

    def teardown(self):
        self.contexts.close()

    @property
    def optimizer(self):
        return self.training.optimizer

    @property
    def bad_gradients_reach_the_base(self):
        """As documented of a frozen scale."""
        return self.optimizer.is_frozen and not self.training.options["skip_nonfinite"]

    def parameter(self, place):
        return self.training.params[place % len(self.training.params)]

    def check(self, roundings=1):
        """Count an operation, and check what must hold after each, if a stored Delta was rounded so often in it."""
        type(self).operations += 1
        checks.check_finite(self.training)
        checks.check_readings(self.training)
        checks.check_groups(self.training)
        self.start.check(self.training, roundings)

    def step(self, closure=None, step=None):
        """A step, or a call that makes one."""
        self.ensure_training_mode()
        before = Before(self.training)
        loss = step() if step else self.optimizer.step(closure)
        before.check_step(self.training)
        if self.is_observed:
            before.check_learned_nothing(self.training, self.unobserved)
        was_skipped = self.optimizer.skipped_steps > before.skipped_steps
        self.is_observed = False if self.training.trains and not was_skipped else None
        if self.training.trains and not was_skipped:
            checks.check_learning_rates(self.training)
        self.check(roundings=2 if step else 1)  # inside the backward pass: with the update, then with the new S
        return loss

    def learn(self, step=None):
        """A step with finite gradients, which must teach every tuner something that has parameters to train.

        Unless something else was observed, perhaps while all parameters of a tuner were frozen.
        """
        learns = self.is_observed is False and not self.optimizer.is_frozen
        counts = {row: checks.steps_of(groups[0]) for row, groups in tuners_of(self.training).items()}
        self.step(step=step)
        for row, groups in tuners_of(self.training).items():
            if learns and any(p.requires_grad for group in groups for p in group["params"]):
                assert checks.steps_of(groups[0]) == counts[row] + 1, "a tuner ignored its feedback"

    def step_on_bad_gradients(self, step=None):
        self.ensure_training_mode()
        bad = {row for row, groups in tuners_of(self.training).items() if checks.has_bad_gradient(groups)}
        before = {row: _without_counts(groups[0]["mechanic_tuner"]) for row, groups in tuners_of(self.training).items()}
        everything = checks.all_bits(self.training)
        was_observed, skipped = self.is_observed, self.optimizer.skipped_steps
        self.step(step=step)
        for row, groups in tuners_of(self.training).items():
            unmoved = row in bad and was_observed is False
            assert not unmoved or _without_counts(groups[0]["mechanic_tuner"]) == before[row], "the tuner has moved"
        if bad and self.training.options["skip_nonfinite"]:
            assert self.optimizer.skipped_steps == skipped + 1
            now = checks.all_bits(self.training)
            for key in ("parameters", "state"):
                assert now[key] == everything[key], f"a skipped step changed the {key}"

    def ensure_training_mode(self):
        if self.is_in_eval_mode:
            self.optimizer.train()
            self.is_in_eval_mode = False
            self.check()

    def must_refuse(self, call, match=None, kinds=REFUSALS):
        """A call that has to raise, and to leave everything as it was."""
        before = checks.all_bits(self.training)
        with pytest.raises(kinds, match=match):
            call()
        checks.assert_same(before, checks.all_bits(self.training), "a refused call")
        self.check()

    def continue_alike(self, twin, seed, go_on_with_copy):
        """One step with the original and a copy: the same, bit for bit."""
        checks.assert_same(checks.all_bits(self.training), checks.all_bits(twin), "a copy")
        original, was_in_eval_mode, was_observed = self.training, self.is_in_eval_mode, self.is_observed
        for training in (original, twin):
            self.training, self.is_in_eval_mode = training, was_in_eval_mode
            self.start, self.is_observed = checks.Start(training), was_observed
            training.fill_gradients(seed)
            self.step()
        checks.assert_same(checks.all_bits(original), checks.all_bits(twin), "a step of a copy")
        if not go_on_with_copy:
            self.training, self.start = original, checks.Start(original)


class Before:
    """What is remembered of the time before a step."""

    def __init__(self, training):
        self.skipped_steps = training.optimizer.skipped_steps
        self._values = [p.detach().clone() for p in training.params]
        self._trainable = [p.requires_grad for p in training.params]
        self._scales = {row: checks.scale_of(groups[0]) for row, groups in tuners_of(training).items()}

    def check_step(self, training):
        """What the learning rate and ``requires_grad`` promise."""
        unmoved = {index for index, trains in enumerate(self._trainable) if not trains}
        for row, groups in tuners_of(training).items():
            rate = max(float(group["lr"]) for group in groups)
            if rate <= 0 and training.config.settle:
                assert checks.scale_of(groups[0]) == self._scales[row], f"S moved at a learning rate of {rate}"
            if training.config.settle and training.base.lr_acts_at_once and all(group["lr"] == 0 for group in groups):
                unmoved.update(index for group in groups for index in training.indices(group))
        for index in unmoved:
            p, former = training.params[index].detach(), self._values[index]
            assert p.equal(former), f"parameter {index} moved from {former} to {p}, at lr = 0 or frozen"

    def check_learned_nothing(self, training, rows):
        """Of tuners that an observation knows nothing of."""
        for row in rows:
            assert checks.scale_of(tuners_of(training)[row][0]) == self._scales[row], "a new tuner learned from others"


class BeforeFailure:
    """What is remembered of the time before a step in which the base raises."""

    def __init__(self, training):
        self._values = [p.detach().clone() for p in training.params]
        self._deltas = [checks.delta_of(training, p) for p in training.params]
        self._tuners = {row: checks.bits(groups[0]["mechanic_tuner"]) for row, groups in tuners_of(training).items()}

    def check(self, training):
        """The base has raised before or after it has worked on some of the parameters. Nothing has moved."""
        for row, groups in tuners_of(training).items():
            assert checks.bits(groups[0]["mechanic_tuner"]) == self._tuners[row], "the tuner has moved"
        for i, p in enumerate(training.params):
            assert p.detach().equal(self._values[i]), f"parameter {i} has moved"
            assert checks.delta_of(training, p).equal(self._deltas[i]), f"Delta of parameter {i} has moved"


def tuners_of(training):
    """The param groups of every tuner, by row."""
    by_row = {}
    for group in training.optimizer.param_groups:
        by_row.setdefault(group["mechanic_row"], []).append(group)
    return by_row


def _without_counts(tuner):
    """The bits of a tuner without what counts steps that were not finite."""
    fields = ("betas", *TunerState._fields)
    return [checks.bits(row) for name, row in zip(fields, tuner, strict=True) if name != "nonfinite_steps"]
