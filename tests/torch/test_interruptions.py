"""Interrupted or watched during a step, parameters are at their values before or after it, and the state is whole."""

import copy
import io
import random
import signal
import sys
import threading
import warnings
from collections import Counter

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import mechanic
from mechanic.torch import Mechanic, Together, buckets
from mechanic.torch import backward as in_backward
from tests.torch.task import backward, mlp, train

# An interrupt at a random moment may come while coverage holds its lock, which nobody would ever open then.
pytestmark = pytest.mark.unmeasured

HOME = mechanic.__file__.removesuffix("__init__.py")


def _muon(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return Together(torch.optim.Muon(matrices, lr=1.0), AdamW([p for p in model.parameters() if p.ndim < 2], lr=1.0))


def _setup(name):
    """A model and its optimizer, in mid-training."""
    torch.manual_seed(0)
    model = mlp(hidden=8, dtype=torch.bfloat16 if "bfloat16" in name else torch.float32)
    base = _muon(model) if "Muon" in name else AdamW(model.parameters(), lr=1.0)
    optimizer = Mechanic(base, delta="int8" if "int8" in name else None)
    if "backward" in name:
        optimizer.step_in_backward()
    train(model, optimizer, 12)
    optimizer.zero_grad()
    return model, optimizer


NAMES = ["AdamW", "AdamW int8", "AdamW bfloat16", "AdamW bfloat16 int8", "AdamW inside backward"]
if hasattr(torch.optim, "Muon"):
    NAMES.append("Muon and AdamW")
every_setup = pytest.mark.parametrize("name", NAMES)


class Interrupt(BaseException):
    pass


class _Moments:
    """Raise at one of the lines of Mechanic's code that run; or count how often each line runs."""

    def __init__(self, line=None, time=1):
        self.seen, self._line, self._time = Counter(), line, time

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.seen[line] += 1
            if line == self._line and self.seen[line] == self._time:
                raise Interrupt
        return self._trace

    def __enter__(self):
        self._former = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self._former)
        return error[0] is Interrupt


def _times_by_line(name):
    model, optimizer = _setup(name)
    with _Moments() as moments:
        _step(model, optimizer)
    return moments.seen


def _values(model):
    return [p.detach().double().clone() for p in model.parameters()]


def _step(model, optimizer, step=12):
    backward(model, step)
    optimizer.step()


def _points(name):
    """The parameters before a step, and after it; inside the backward pass also after the base's part of it."""
    model, optimizer = _setup(name)
    points = [_values(model)]
    backward(model, 12)
    points.append(_values(model))
    optimizer.step()
    return [*points, _values(model)]


def _outside(model, points):
    """How far an element is outside of where it was on its way, as a share of the step."""
    farthest = 0.0
    for p, *at in zip(_values(model), *points, strict=True):
        low, high = torch.stack(at).amin(0), torch.stack(at).amax(0)
        farthest = max(farthest, ((low - p).clamp(min=0) + (p - high).clamp(min=0)).max().item())
    size = max((a - b).abs().max().item() for a, b in zip(points[0], points[-1], strict=True))
    return farthest / size


def _goes_on(model, optimizer):
    assert all("mechanic_delta" in optimizer.state[p] for p in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a whole backward pass without step()
        optimizer.zero_grad()
    _step(model, optimizer, 13)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.long
@every_setup
def test_an_exception_at_any_line_leaves_every_parameter_before_or_after_its_move(name, monkeypatch):
    monkeypatch.setitem(buckets.PART, "cpu", 100)  # several parts
    monkeypatch.setattr(in_backward, "WAITING", 1)
    points = _points(name)
    saved = _setup(name)
    counts = _times_by_line(name)
    lines = [(line, (1, count)[index % 2]) for index, (line, count) in enumerate(sorted(counts.items()))]
    assert len(lines) > 150
    # Of the lines that a setup before this one runs as well, each setup has another third.
    known = set().union(*(_times_by_line(other) for other in NAMES[: NAMES.index(name)]))
    lines = [at for index, at in enumerate(lines) if at[0] not in known or index % 3 == NAMES.index(name) % 3]
    for line, time in lines:
        model, optimizer = copy.deepcopy(saved)
        with _Moments(line, time):
            _step(model, optimizer)
        torch.set_grad_enabled(True)
        assert _outside(model, points) <= 1e-5, (line, time)
        _goes_on(model, optimizer)


class _Failing(TorchDispatchMode):
    """The operation of this number fails, as if memory had run out."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError
        return function(*args, **(kwargs or {}))


@pytest.mark.long
@every_setup
def test_an_operation_that_fails_leaves_every_parameter_before_or_after_its_move(name):
    if "backward" in name:
        pytest.skip("the mode would see the backward pass as well")
    points, saved, number = _points(name), _setup(name), 0
    while True:
        number += 5
        model, optimizer = copy.deepcopy(saved)
        backward(model, 12)
        try:
            with _Failing(number):
                optimizer.step()
            break
        except torch.OutOfMemoryError:
            assert _outside(model, points) <= 1e-5, number
            _goes_on(model, optimizer)
    assert number > 50


@pytest.mark.long
@pytest.mark.parametrize("name", ["AdamW", "AdamW bfloat16 int8"])
def test_ctrl_c_at_random_moments_leaves_every_parameter_before_or_after_its_move(name):
    def interrupt(*_):
        raise KeyboardInterrupt

    former, generator = signal.signal(signal.SIGALRM, interrupt), random.Random(0)
    saved = _setup(name)
    try:
        for _ in range(60):
            model, optimizer = copy.deepcopy(saved)
            points = [_values(model)]
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.0005, 0.02))
                for step in range(12, 1000):
                    optimizer.zero_grad()
                    backward(model, step)
                    points = [*points[-1:], _values(model)]
                    optimizer.step()
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
            torch.set_grad_enabled(True)
            twin, twin_optimizer = copy.deepcopy((model, optimizer))
            _step(twin, twin_optimizer, 13)  # about as long as the step that was interrupted
            size = max((a - b).abs().max().item() for a, b in zip(_values(twin), points[-1], strict=True))
            moved = max((a - b).abs().max().item() for a, b in zip(_values(model), points[-1], strict=True))
            assert moved <= 5 * size
            _goes_on(model, optimizer)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


@pytest.mark.long
@pytest.mark.parametrize("delta", [None, "int8"])
def test_a_thread_and_a_signal_handler_see_parameters_from_before_or_after_a_step(delta):
    p = torch.nn.Parameter(torch.full((300_000,), 5.0))
    optimizer = Mechanic(AdamW([p], lr=1.0), delta=delta)
    seen, low, high = [], 5.0, 5.0

    def look(*_):
        seen.append(p.detach()[::997].mean().item())

    def steps(count):
        nonlocal low, high
        for _ in range(count):
            p.grad = p.detach() - 8.0
            optimizer.step()
            low, high = min(low, p.mean().item()), max(high, p.mean().item())

    stop = threading.Event()

    def watch():
        while not stop.wait(0.0003):
            look()

    thread = threading.Thread(target=watch)
    former = signal.signal(signal.SIGALRM, look)
    try:
        thread.start()
        steps(40)
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        steps(40)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        stop.set()
        thread.join()
    assert len(seen) > 20
    assert all(low - 1e-3 <= value <= high + 1e-3 for value in seen)


@pytest.mark.long
def test_a_state_dict_that_was_handed_out_stays_whole_while_training_goes_on():
    params = [torch.nn.Parameter(torch.randn(20_000)) for _ in range(8)]
    optimizer = Mechanic(AdamW(params, lr=1.0))

    def steps(count):
        for _ in range(count):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()

    steps(2)
    state_dict, stop, saved = optimizer.state_dict(), threading.Event(), []

    def save():
        while not stop.is_set():
            file = io.BytesIO()
            torch.save(state_dict, file)
            saved.append(file)

    thread = threading.Thread(target=save)
    thread.start()
    steps(20)
    stop.set()
    thread.join()
    for file in saved:
        file.seek(0)
        state = torch.load(file, weights_only=True)["state"]
        assert all({"mechanic_delta", "exp_avg"} <= entry.keys() for entry in state.values())
    assert saved


def test_two_threads_that_step_lose_no_global_hook():
    calls = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(optimizer))
    inside, done = threading.Event(), threading.Event()

    class Slow(SGD):
        def step(self, closure=None):
            inside.set()
            done.wait(5)
            return super().step()

    def wrapped(cls):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        return Mechanic(cls([p], lr=1.0))

    slow, quick = wrapped(Slow), wrapped(SGD)
    try:
        thread = threading.Thread(target=slow.step)
        thread.start()
        inside.wait(5)
        quick.step()
        done.set()
        thread.join()
        calls.clear()
        bare = wrapped(SGD)
        bare.step()
        assert calls == [bare]
    finally:
        handle.remove()
