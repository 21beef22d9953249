"""``python -m benchmarks.long_runs``: small problems at a constant learning rate, for thousands of steps.

What can go wrong there is that the loss comes back up after it has been low. Per problem and base, the table has the
minimum of the loss, its largest value after that minimum, and the median of the last steps, all as shares of the first
loss; for the defaults, for ``TunerConfig(forgetting=0.0)``, for ``TunerConfig.paper()`` and for the bare base at the
best learning rate of a grid of decades.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable

import pytorch_optimizer
import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.report.markdown import table
from mechanic import TunerConfig
from mechanic.torch import Mechanic

Loss = Callable[[Tensor, Tensor | None], Tensor]  # of the parameters and the chosen rows; None is all of them
Problem = tuple[Tensor, Loss, int]  # the first parameters, the loss, and how many rows to draw from; 0: no rows

BATCH = 10
LRS = [10.0**exponent for exponent in range(-5, 3)]
BASES: dict[str, Callable[..., Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, foreach=False),
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9, foreach=False),
    "AdamW": functools.partial(torch.optim.AdamW, weight_decay=0.01, foreach=False),
    "AdamW, decay 1e-4": functools.partial(torch.optim.AdamW, weight_decay=1e-4, foreach=False),
    "Lion": functools.partial(pytorch_optimizer.Lion, weight_decay=0.0),
}
CONFIGS = {"default": TunerConfig(), "forgetting=0": TunerConfig(forgetting=0.0), "paper": TunerConfig.paper()}


def separable_logistic() -> Problem:
    """100 points in 10 dimensions that a plane tells apart, full batch: the loss has no minimum."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(100, 10, generator=generator, dtype=torch.float64)
    points *= (points @ torch.randn(10, generator=generator, dtype=torch.float64)).sign().unsqueeze(1)
    first = 0.1 * torch.randn(10, generator=generator, dtype=torch.float64)
    return first, lambda x, rows: torch.nn.functional.softplus(-(points @ x)).mean(), 0


def quadratic(condition: float) -> Problem:
    eigenvalues = torch.logspace(-math.log10(condition), 0, 20, dtype=torch.float64)
    return torch.ones(20, dtype=torch.float64), lambda x, rows: (eigenvalues * x * x).sum(), 0


def interpolating_regression() -> Problem:
    """50 equations with 100 unknowns, in batches: all can be solved, so at the minimum there is no noise."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, 100, generator=generator, dtype=torch.float64) / 10
    targets = inputs @ torch.randn(100, generator=generator, dtype=torch.float64)
    first = 0.1 * torch.randn(100, generator=generator, dtype=torch.float64)

    def loss(x: Tensor, rows: Tensor | None) -> Tensor:
        chosen = slice(None) if rows is None else rows
        return (inputs[chosen] @ x - targets[chosen]).square().mean()

    return first, loss, 50


def noisy_network() -> Problem:
    """A network of one hidden layer with enough weights to learn 64 noisy targets by heart, in batches."""
    generator = torch.Generator().manual_seed(0)
    inputs, weights = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((64, 5), (5,)))
    targets = (inputs @ weights).sin() + 0.1 * torch.randn(64, generator=generator, dtype=torch.float64)
    sizes = [5 * 16, 16, 16]
    scales = torch.cat([torch.full((size,), scale) for size, scale in zip(sizes, (5**-0.5, 0.0, 0.25), strict=True)])
    first = scales.double() * torch.randn(sum(sizes), generator=generator, dtype=torch.float64)

    def loss(x: Tensor, rows: Tensor | None) -> Tensor:
        chosen = slice(None) if rows is None else rows
        into, bias, out = x.split(sizes)
        hidden = (inputs[chosen] @ into.view(5, 16) + bias).tanh()
        return (hidden @ out - targets[chosen]).square().mean()

    return first, loss, 64


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "separable logistic": separable_logistic,
    "quadratic, condition 100": functools.partial(quadratic, 100.0),
    "quadratic, condition 1e4": functools.partial(quadratic, 1e4),
    "interpolating regression": interpolating_regression,
    "noisy network": noisy_network,
}


def losses_of(problem: Problem, make: Callable[[list[Tensor]], Optimizer], steps: int) -> list[float]:
    """Of all rows, before every step and after the last; as shares of the first one."""
    first, loss, count = problem
    x = torch.nn.Parameter(first.clone())
    optimizer = make([x])
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        rows = torch.randint(count, (BATCH,), generator=generator) if count else None
        optimizer.zero_grad()
        value = loss(x, rows)
        value.backward()
        with torch.no_grad():
            losses.append(value.item() if rows is None else loss(x, None).item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.step()
    return [value / losses[0] for value in losses]


def summary(losses: list[float]) -> tuple[float, float, float]:
    """The minimum, the largest loss after it, and the median of the last sixteenth."""
    if not math.isfinite(losses[-1]):
        return min(losses[:-1]), math.inf, math.inf
    lowest = min(losses)
    return lowest, max(losses[losses.index(lowest) :]), statistics.median(losses[-max(1, len(losses) // 16) :])


def rows_of(problem_name: str, steps: int) -> list[list[str]]:
    problem = PROBLEMS[problem_name]()
    rows = []
    for base_name, base in BASES.items():
        found = [
            summary(losses_of(problem, lambda x, c=config: Mechanic(base(x, lr=1.0), config=c), steps))  # noqa: B023
            for config in CONFIGS.values()
        ]
        grid = [summary(losses_of(problem, functools.partial(base, lr=lr), steps)) for lr in LRS]
        cells = [*found, min(grid, key=lambda cell: cell[-1])]
        rows.append([problem_name, base_name, *(" / ".join(f"{share:.0e}" for share in cell) for cell in cells)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_runs", description=__doc__)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--problem", choices=PROBLEMS, help="one of them only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in [arguments.problem] if arguments.problem else PROBLEMS:
        rows += rows_of(name, arguments.steps)
    print("minimum / largest after it / last, as shares of the first loss\n")
    print(table(["problem", "base", *CONFIGS, "bare, best lr"], rows))


if __name__ == "__main__":
    main()
