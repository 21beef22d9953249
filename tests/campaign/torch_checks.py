"""What must hold after every operation."""

import math
from typing import NamedTuple

import pytest
import torch

from mechanic.integrations import readings
from mechanic.torch.buckets import decoded
from mechanic.torch.delta import SMALLEST_SCALE
from mechanic.tuner import TunerState

SCALES, STEPS = (1 + TunerState._fields.index(name) for name in ("scales", "steps"))  # the betas come first
DELTA, RESIDUAL = "mechanic_delta", "mechanic_residual"

# How far rounding may take an element of Delta, relative to the largest one, by the dtype that Delta is stored in. If
# the largest is below what the dtype can resolve, it is relative to that: gradients of 1e30 make Deltas of 1e-33.
GAPS = {torch.bfloat16: 2**-7, torch.int8: 2 / 127}


def bits(value):
    """Nested containers of tensors and numbers as something that compares bit for bit."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [bits(entry) for entry in value]
    return repr(value) if isinstance(value, float) else value


def all_bits(training):
    """All that a refused call must leave alone, and all that a copy must have. Of rows only who shares one."""
    optimizer = training.optimizer
    rows = [group.get("mechanic_row") for group in optimizer.param_groups]
    return {
        "parameters": bits(training.params),
        "requires_grad": [p.requires_grad for p in training.params],
        "state": [bits(dict(optimizer.state.get(p, {}))) for p in training.params],
        "groups": [
            bits({key: value for key, value in group.items() if key not in ("params", "mechanic_row")})
            for group in optimizer.param_groups
        ],
        "parameters of groups": [training.indices(group) for group in optimizer.param_groups],
        "rows": [rows.index(row) for row in rows],
        "skipped steps": optimizer.skipped_steps,
        "frozen": optimizer.is_frozen,
    }


def assert_same(a, b, what):
    """Of two results of :func:`all_bits`; names what differs."""
    assert a == b, f"{what} differs in {', '.join(_differences('', a, b))}"


def _differences(where, a, b):
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [name for key in a for name in _differences(f"{where}[{key!r}]", a[key], b[key])]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [name for i in range(len(a)) for name in _differences(f"{where}[{i}]", a[i], b[i])]
    return [where] if a != b else []


def scale_of(group):
    """S in float64, 0-dim."""
    return group["mechanic_tuner"][SCALES].sum().double()


def steps_of(group):
    """How many steps the tuner has learned from."""
    return group["mechanic_tuner"][STEPS, 0].item()


def value_of(p, state):
    """What a parameter stands for, in double precision: in half precision the residual is a part of it."""
    p = p.detach()
    if RESIDUAL in state:
        value = p.float() + state[RESIDUAL].float()
        return torch.where(value.to(p.dtype) == p, value, p.float()).double()  # else somebody has written to it since
    return wide(p)


def wide(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def delta_of(training, p):
    """A copy of Delta, zero where there is none."""
    delta = delta_in(training.optimizer.state.get(p, {}))
    working = torch.promote_types(p.dtype, torch.float32)
    return torch.zeros_like(p.detach()) if delta is None else delta.to(working, copy=True)


def delta_in(state):
    """Delta as a tensor of numbers, whatever it is stored in; None if there is none."""
    return decoded(state).get(DELTA)


def gap_of(training, p):
    """How far rounding may take an element of Delta in one step."""
    state = training.optimizer.state.get(p, {})
    if DELTA not in state:
        return 0.0
    dtype = state[DELTA].dtype
    precision = GAPS.get(dtype, 2**-23 if dtype == torch.float32 and p.dtype == torch.float64 else 0.0)
    smallest = SMALLEST_SCALE if dtype == torch.int8 else torch.finfo(torch.float32).tiny
    return 1.1 * precision * max(delta_in(state).abs().max().item(), smallest)


def has_bad_gradient(groups):
    """Whether the square of some gradient leaves the range of the dtype that the sums are taken in."""
    grads = [p.grad.abs() for group in groups for p in group["params"] if p.requires_grad and p.grad is not None]
    limit = {torch.float64: 1e150}
    return any(not (grad <= limit.get(grad.dtype, 1e19)).all() for grad in grads)


def check_finite(training):
    """Also of the base's own state: its moments stay finite as well."""
    optimizer = training.optimizer
    tensors = {f"parameter {i}": p.detach() for i, p in enumerate(training.params)}
    for i, p in enumerate(training.params):
        for key, entry in optimizer.state.get(p, {}).items():
            if isinstance(entry, torch.Tensor):
                tensors[f"{key} of parameter {i}"] = entry
    for i, group in enumerate(optimizer.param_groups):
        tensors[f"tuner of group {i}"] = group["mechanic_tuner"]
    for name, tensor in tensors.items():
        assert tensor.isfinite().all(), f"{name} is not finite: {tensor}"


def check_readings(training):
    scales = training.optimizer.scales()
    assert all(math.isfinite(scale) and scale >= 0 for scale in scales.values()), f"scales are {scales}"
    assert len(scales) == len({group["mechanic_row"] for group in training.optimizer.param_groups})
    others = readings(training.optimizer)  # the learning rates among them
    assert all(math.isfinite(value) for value in others.values()), f"readings are {others}"


def check_learning_rates(training):
    """After a step: S times the learning rate it was made with, of the group with the largest one."""
    expected = {}
    for group in training.optimizer.param_groups:
        rate = float(scale_of(group) * group["lr"]) / group["mechanic_unit"]
        expected[group["mechanic_row"]] = max(rate, expected.get(group["mechanic_row"], -math.inf))
    rates = training.optimizer.learning_rates().values()
    assert sorted(rates) == pytest.approx(sorted(expected.values()), rel=1e-12, abs=0)


def check_groups(training):
    """One row, one tuner and one unit per name; groups that name none share one, or have one each."""
    by_row = {}
    for index, group in enumerate(training.optimizer.param_groups):
        name = group.get("tuner") or (index if training.options["per_group"] else None)
        by_row.setdefault(group["mechanic_row"], []).append((name, group))
    names = [{name for name, _ in sharing} for sharing in by_row.values()]
    assert all(len(some) == 1 for some in names), f"tuners {names} share a row"
    assert len(names) == len(set.union(*names)), f"one tuner has several rows: {names}"
    assert len({group.get("mechanic_skipped") for group in training.optimizer.param_groups}) == 1
    for sharing in by_row.values():
        for key in ("mechanic_tuner", "mechanic_unit", "mechanic_frozen"):
            first, *others = (bits(group.get(key)) for _, group in sharing)
            assert all(other == first for other in others), f"groups of one tuner disagree in {key}"


class Start:
    """Where every parameter would be at S = 0: x_1 = x - S Delta.

    Steps, forgetting included, leave it as it is. It moves only where others write to a parameter, and where S changes
    while a layer is frozen, since such a parameter stays where it is.
    """

    def __init__(self, training):
        self._points, self._sizes = _points(training), sizes(training)

    def check(self, training, roundings):
        points, new_sizes = _points(training), sizes(training)
        for i, (former, now) in enumerate(zip(self._points, points, strict=True)):
            if former is None or now is None or not training.params[i].requires_grad:
                continue
            moved, allowed = (now - former).abs().max().item(), rounding(training) * (self._sizes[i] + new_sizes[i])
            # A step moves x by the Delta that is not rounded yet, so x - S Delta by S times what is rounded.
            gap = roundings * gap_of(training, training.params[i])
            allowed += max(self._sizes[i].scale, new_sizes[i].scale) * gap
            assert moved <= allowed, f"x - S Delta of parameter {i} moved by {moved}, rounding allows {allowed}"
        self._points, self._sizes = points, new_sizes


def _points(training):
    """x - S Delta, by parameter; None where the scale is frozen."""
    points = [None] * len(training.params)
    for group in [] if training.optimizer.is_frozen else training.optimizer.param_groups:
        for index in training.indices(group):
            p = training.params[index]
            state = training.optimizer.state.get(p, {})
            points[index] = value_of(p, state) - scale_of(group) * wide(delta_of(training, p))
    return points


class Sizes(NamedTuple):
    """What a step adds up: rounding is a small part of it."""

    x: float
    scale: float
    delta: float

    def __add__(self, after):
        """Before a step, plus after it."""
        return self.x + after.x + (self.scale + after.scale) * (self.delta + after.delta)


def sizes(training):
    result = [Sizes(0.0, 0.0, 0.0)] * len(training.params)
    for group in training.optimizer.param_groups:
        for index in training.indices(group):
            p = training.params[index]
            delta = delta_in(training.optimizer.state.get(p, {}))
            sizes = [0.0 if tensor is None else tensor.detach().abs().max().item() for tensor in (p, delta)]
            result[index] = Sizes(sizes[0], scale_of(group).item(), sizes[1])
    return result


def rounding(training):
    """Of one step, relative: some ten operations, and in half precision the rounding of the residual."""
    if training.is_half_precision:
        return torch.finfo(training.dtype).eps / 64
    return 16 * torch.finfo(training.dtype).eps
