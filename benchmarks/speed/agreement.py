"""The kernels for GPUs against the eager step, on a device: every rule, half precision, several tuners, NaN."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, optim

from benchmarks.speed.device import Device
from mechanic.torch import Mechanic
from mechanic.torch.gpu import choice
from mechanic.torch.layout import DELTA, RESIDUAL
from mechanic.torch.step import step_eagerly
from mechanic.torch.stored import INT8, decoded

Groups = list[dict[str, Any]]
LIMIT = 1e-4
"""How far they may be apart after some steps, relative to the largest number in a tensor; rounding leaves 1e-6."""
LIMIT_IF_STORED = 1e-3
"""With Deltas in fewer bytes: where one is rounded the other way, its parameter is 1e-4 off a step later."""


def _lion(groups: Groups) -> Any:
    import pytorch_optimizer

    return pytorch_optimizer.Lion(groups, lr=1.0, weight_decay=0.1)


BASES: dict[str, Callable[[Groups], Any]] = {
    "AdamW": lambda g: optim.AdamW(g, lr=0.7, weight_decay=0.1),
    "SGD": lambda g: optim.SGD(g, lr=0.1, weight_decay=0.01),
    "AdamW amsgrad": lambda g: optim.AdamW(g, lr=1.0, weight_decay=0.1, amsgrad=True),
    "AdamW fused": lambda g: optim.AdamW(g, lr=0.7, weight_decay=0.1, fused=True),
    "Adam with L2": lambda g: optim.Adam(g, lr=0.5, weight_decay=0.01),
    "Adam maximize": lambda g: optim.Adam(g, lr=1.0, maximize=True),
    "SGD momentum": lambda g: optim.SGD(g, lr=0.1, momentum=0.9, dampening=0.3),
    "SGD nesterov": lambda g: optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Lion": _lion,
    "NAdam": lambda g: optim.NAdam(g, lr=1.0, weight_decay=0.01),
    "NAdamW": lambda g: optim.NAdam(g, lr=1.0, weight_decay=0.1, decoupled_weight_decay=True),
    "RMSprop": lambda g: optim.RMSprop(g, lr=1.0),
    "RMSprop momentum": lambda g: optim.RMSprop(g, lr=1.0, momentum=0.9, weight_decay=0.01),
    "Adagrad": lambda g: optim.Adagrad(g, lr=1.0, weight_decay=0.01),
    "RAdam": lambda g: optim.RAdam(g, lr=1.0, weight_decay=0.1, decoupled_weight_decay=True),
}
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "several tuners": {"tuners": 3},
    "NaN": {"bad": torch.nan},
    "infinity, bfloat16": {"bad": torch.inf, "dtype": torch.bfloat16},
    "Delta in bfloat16": {"delta": torch.bfloat16},
    "Delta in int8": {"delta": INT8},
}
IN_TINY_MODE = [("AdamW", "bfloat16"), ("SGD", "several tuners"), ("AdamW amsgrad", "NaN"), ("AdamW", "Delta in int8")]


@contextmanager
def using(kernels: str) -> Iterator[None]:
    """Step with Triton's kernels or with the eager ones."""
    was = os.environ.get(choice.VARIABLE)
    os.environ[choice.VARIABLE] = kernels
    try:
        yield
    finally:
        if was is None:
            del os.environ[choice.VARIABLE]
        else:
            os.environ[choice.VARIABLE] = was


def kernels_in_use(device: Device) -> str:
    """Which kernels a step uses if nobody says which, and why."""
    if not device.is_gpu:
        return "eager, on a CPU"
    if find_spec("triton") is None:
        return "eager, since Triton is not installed"
    reasons = [choice.reason_not_to_use(device.torch_device, step_eagerly, half=half) for half in (False, True)]
    return next((f"eager, since {reason}" for reason in reasons if reason), "Triton")


def compare(device: Device) -> list[dict[str, Any]]:
    """The largest difference in every case."""
    if find_spec("triton") is None:
        return [{"base": "all", "way": "", "skipped": "Triton is not installed"}]
    cases = IN_TINY_MODE if device.tiny else [(base, way) for base in BASES for way in WAYS]
    return [{"base": base, "way": way, **_case(device, base, **WAYS[way])} for base, way in cases]


def _case(device: Device, base: str, **options: Any) -> dict[str, Any]:
    try:
        runs = [_run(device, base, kernels, **options) for kernels in ("eager", "triton")]
    except ImportError as error:
        return {"skipped": f"{error.name} is not installed"}
    except Exception as error:  # the other cases are still of interest
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
    rounded = options.get("delta") is not None
    worst = max(_distance(a, b, rounded and name == "Delta") for (name, a), (_, b) in zip(*runs, strict=True))
    return {"difference": float(f"{worst:.2g}"), "agree": worst <= (LIMIT_IF_STORED if rounded else LIMIT)}


def _run(
    device: Device,
    base: str,
    kernels: str,
    dtype: torch.dtype = torch.float32,
    tuners: int = 1,
    bad: float | None = None,
    delta: Any = None,
) -> list[tuple[str, Tensor]]:
    """What the parameters stand for after some steps, their Deltas, and the tuners, each with what it is."""
    sizes: list[tuple[int, ...]] = [(7, 5), (5,), (3,)]
    if not device.tiny:
        sizes += [(768,), (33, 41), (1,), (0,), ()]
    if not (device.tiny or base == "Lion"):  # its update is a sign: among many numbers one is so small that it may flip
        sizes += [(300, 250), (1025, 1024)]
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(device.torch_device, dtype)

    params = [torch.nn.Parameter(random(shape)) for shape in sizes]
    groups = [{"params": params[start::tuners]} for start in range(tuners)]
    optimizer = Mechanic(BASES[base](groups), per_group=tuners > 1, delta=delta)
    for step in range(2 if device.tiny else 6):
        for p in params:
            p.grad = random(tuple(p.shape)) + 0.3
        if bad is not None and step == 1:
            params[0].grad[3, 4] = bad  # type: ignore[index]
        with using(kernels):
            optimizer.step()
    state = [optimizer.state[p] for p in params]
    values = [p.detach().float() + kept.get(RESIDUAL, 0.0) for p, kept in zip(params, state, strict=True)]
    scales = torch.tensor(list(optimizer.scales().values()))
    deltas = [decoded(kept)[DELTA].float() for kept in state]
    return [*(("parameter", p) for p in values), *(("Delta", kept) for kept in deltas), ("tuners", scales)]


def _distance(a: Tensor, b: Tensor, rounded: bool) -> float:
    """Relative to the largest number. A stored Delta may be rounded the other way in places, so its mean counts."""
    if not a.numel():
        return 0.0
    apart = (a - b).abs()
    largest, difference = a.abs().max().item(), (apart.mean() if rounded else apart.max()).item()
    if difference != difference:
        return float("inf")
    return difference / largest if largest else difference
