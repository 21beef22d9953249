"""A run that was killed continues where it was saved, and ends on the same record, bit for bit."""

import functools
import math
import multiprocessing
import os
import signal
import types
from dataclasses import replace

import pytest
import torch

from benchmarks.suite.contenders import BASES, CONTENDERS
from benchmarks.suite.loop import Training
from benchmarks.suite.measure import Settings, execute, measure
from benchmarks.suite.partial import Partial, path_of
from benchmarks.suite.record import Run
from benchmarks.suite.tasks import TASKS
from tests.benchmarks.runs import KINDS, needs_data, some_lr

STEPS, FATAL = 20, 13
RUN = Run("gpt-shakespeare-dropout0.3", "mechanic adamw", 1.0, 0)


class Killed(BaseException):
    """No Exception: nobody may take it for a contender's."""


def raise_killed():
    raise Killed


def dies(contender, fate):
    """The contender, but for its fate after so many steps."""

    def build(model, task, lr):
        optimizer = contender.build(model, task, lr)
        take_step, taken = optimizer.step, 0

        def step(self, closure=None):
            nonlocal taken
            taken += 1
            if taken == FATAL:
                fate()
            return take_step(closure)

        optimizer.step = types.MethodType(step, optimizer)
        return optimizer

    return replace(contender, build=build)


def small(name):
    return replace(TASKS[name], steps=STEPS)


@needs_data
@pytest.mark.parametrize(
    "name", [name for name in KINDS if name in BASES or not name.endswith(("sgd", "nadamw", "lion"))]
)
def test_every_contender_continues_as_if_nothing_had_been(name, tmp_path):
    task, contender = small("mlp-adult"), CONTENDERS[name]
    lr = some_lr(contender)
    partial = functools.partial(Partial, tmp_path / "run.pt", {}, minutes=0.0)
    whole = measure(task, contender, lr, seed=0)
    with pytest.raises(Killed):
        measure(task, dies(contender, raise_killed), lr, seed=0, partial=partial())
    assert partial().load()["training"]["step"] == FATAL - 1
    torch.rand(5)  # whatever the next process has drawn
    continued = measure(task, contender, lr, seed=0, partial=partial())
    assert continued["curve"] == whole["curve"]


@needs_data
@pytest.mark.parametrize(
    ("name", "observes_every"),
    [("gpt-shakespeare-dropout0.3", 0), ("bert-mlm", 0), ("resnet-cifar10", 0), ("cnn-mnist-500", 4)],
)
def test_weights_are_equal_with_dropout_masks_batch_norms_and_held_out_rows(name, observes_every):
    task = small(name)
    build = functools.partial(CONTENDERS["mechanic adamw"].build, task=task, lr=1.0)
    whole, first, second = (Training(task, build, seed=3, observes_every=observes_every) for _ in range(3))
    torch.manual_seed(3)
    for _ in whole:
        pass
    torch.manual_seed(3)
    next(step for step, _, _ in first if step == FATAL)
    second.load_state_dict(first.state_dict())
    assert [step for step, _, _ in second] == list(range(FATAL + 1, STEPS + 1))
    for key, expected in whole.model.state_dict().items():
        assert second.model.state_dict()[key].equal(expected), key


def run_and_die(records):
    """In a process of its own."""
    CONTENDERS[RUN.contender] = dies(CONTENDERS[RUN.contender], lambda: os.kill(os.getpid(), signal.SIGKILL))
    TASKS[RUN.task] = small(RUN.task)
    execute(RUN, Settings("abc1234", records=records, checkpoint_minutes=0.0))


@needs_data
@pytest.mark.long
def test_a_run_whose_process_is_killed_ends_on_the_same_record(tmp_path, monkeypatch):
    process = multiprocessing.get_context("spawn").Process(target=run_and_die, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    saved = torch.load(path_of(tmp_path, RUN), weights_only=False)
    assert saved["state"]["training"]["step"] == FATAL - 1

    monkeypatch.setitem(TASKS, RUN.task, small(RUN.task))
    taken, take_step = [], Training._take_step
    monkeypatch.setattr(Training, "_take_step", lambda self: (taken.append(self.step), take_step(self)))
    continued = execute(RUN, Settings("abc1234", records=tmp_path, checkpoint_minutes=0.0))
    assert taken == list(range(FATAL - 1, STEPS))
    whole = execute(RUN, Settings("abc1234"))
    for key in ("seconds", "cpu_seconds"):
        assert continued.pop(key) > 0 < whole.pop(key)
    assert continued == whole


def test_what_other_code_has_saved_or_is_not_whole_is_not_continued(tmp_path):
    partial = Partial(tmp_path / "run.pt", {"commit": "old"}, minutes=0.0)
    assert partial.load() is None
    partial.save({"step": 3})
    assert partial.load() == {"step": 3}
    assert Partial(tmp_path / "run.pt", {"commit": "new"}, minutes=0.0).load() is None
    partial.path.write_bytes(partial.path.read_bytes()[:-100])
    assert partial.load() is None
    assert not Partial(tmp_path / "run.pt", {}, minutes=10.0).due()  # a short run saves nothing


@needs_data
@pytest.mark.parametrize("name", ["mechanic adamw", "dog", "schedule-free sgd"])
def test_on_a_device_of_another_name_the_same_is_found(name):
    task, contender = small("resnet-cifar10"), CONTENDERS[name]
    here, there = (measure(task, contender, contender.lr, seed=0, device=device) for device in ("cpu", "cpu:0"))
    assert here["curve"] == there["curve"]
    assert all(map(math.isfinite, here["curve"]["train_loss"]))
