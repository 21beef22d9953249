"""What a step must do, worked out beside Mechanic: S' in NumPy, and the base's update by a bare base."""

import copy
import dataclasses

import numpy as np
import torch

from mechanic.tuner import TunerState, delta_retention, total_scale, update
from tests.campaign.torch_checks import DELTA, delta_in, delta_of, gap_of, scale_of, sizes

ROUNDING = 1e-12


@dataclasses.dataclass
class Step:
    scales: list[float]  # S', by parameter
    deltas: list[torch.Tensor | None]
    values: list[torch.Tensor]


def predict(training):
    """The step that comes, of float64 parameters whose gradients are there and finite."""
    frozen = training.optimizer.is_frozen
    steps = steps_of_bare_base(training, scaled=frozen)
    prediction = Step([0.0] * len(steps), [None] * len(steps), [p.detach().clone() for p in training.params])
    tuners = {}
    for group in training.optimizer.param_groups:
        tuners.setdefault(group["mechanic_row"], []).append(group)
    for groups in tuners.values():
        scale, new_scale, kept = _tune(training, groups)
        for index in (index for group in groups for index in training.indices(group)):
            p = training.params[index]
            state = training.optimizer.state.get(p, {})
            prediction.scales[index] = scale if frozen else new_scale
            prediction.deltas[index] = delta_in(state)
            if not p.requires_grad or (p.grad is None and DELTA not in state):
                continue
            if frozen:
                prediction.values[index] += steps[index]
                continue
            delta = delta_of(training, p)
            new_delta = kept * delta + steps[index]
            prediction.deltas[index] = new_delta
            prediction.values[index] += new_scale * new_delta - scale * delta
    return prediction


def check(training, prediction, sizes_before):
    """Compare with what happened."""
    for group in training.optimizer.param_groups:
        scale = scale_of(group)
        for index in training.indices(group):
            p, expected = training.params[index], prediction.deltas[index]
            before, after = sizes_before[index], sizes(training)[index]
            # A bare base steps on x, so its update has a rounding of x in it, which S multiplies.
            size_of_step = before.x + before.delta + after.delta
            _assert_close(prediction.scales[index], scale, 1e-9 * scale, f"S of parameter {index}")
            _assert_close(
                prediction.values[index],
                p.detach(),
                ROUNDING * (before + after + scale * size_of_step),
                f"parameter {index}",
            )
            delta = delta_in(training.optimizer.state.get(p, {}))
            if expected is not None and delta is not None:
                tolerance = ROUNDING * size_of_step + gap_of(training, p)
                _assert_close(expected, delta, tolerance, f"Delta of parameter {index}")


def _assert_close(expected, found, tolerance, what):
    difference = torch.as_tensor(expected - found).abs().max().item()
    assert difference <= tolerance, f"{what}: predicted {expected}, found {found}"


def _tune(training, groups):
    """S, S' and the share of Delta that is kept, of one tuner."""
    betas, *fields = groups[0]["mechanic_tuner"].numpy()
    state = TunerState(*(field[None] for field in fields))
    sums = np.zeros(5)
    for p in (p for group in groups for p in group["params"] if p.requires_grad):
        x = p.detach().numpy().ravel()
        g = np.zeros_like(x) if p.grad is None else p.grad.numpy().ravel()
        d = delta_of(training, p).double().numpy().ravel()
        sums += [d @ g, d @ x, g @ g, x @ x, d @ d]
    rate = np.array([max(float(group["lr"]) for group in groups)])
    tuned = update(state, sums[None], betas, training.config, np, rate)
    kept = delta_retention(state, tuned, training.config, np, rate)
    return total_scale(state, np)[0], total_scale(tuned, np)[0], 1.0 if kept is None else float(kept[0])


def steps_of_bare_base(training, *, scaled):
    """What the base proposes from where it stands, at learning rates in units, times S if ``scaled``."""
    optimizer = training.optimizer
    values = [torch.nn.Parameter(p.detach().clone()) for p in training.params]
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params" and not key.startswith("mechanic_")}
        factor = float(scale_of(group)) if scaled and training.base.is_linear_in_lr else 1.0
        options["lr"] = group["lr"] / group["mechanic_unit"] * factor
        groups.append({**copy.deepcopy(options), "params": [values[i] for i in training.indices(group)]})
    bare = training.base.cls(groups, lr=1.0, **training.base.options)
    for new, p in zip(values, training.params, strict=True):
        state = optimizer.state.get(p, {})
        if training.base.own_iterates and DELTA in state:
            group = next(group for group in optimizer.param_groups if any(p is other for other in group["params"]))
            new.data += (1 - scale_of(group)) * delta_of(training, p)
        if own := {key: entry for key, entry in state.items() if not key.startswith("mechanic_")}:
            bare.state[new] = copy.deepcopy(own)
        new.grad = p.grad.clone() if p.requires_grad and p.grad is not None else None
    before = [new.detach().clone() for new in values]
    bare.step()
    steps = [new.detach() - old for new, old in zip(values, before, strict=True)]
    if scaled and not training.base.is_linear_in_lr:
        scales = {i: scale_of(group) for group in optimizer.param_groups for i in training.indices(group)}
        steps = [scales[i] * step if i in scales else step for i, step in enumerate(steps)]
    return steps
