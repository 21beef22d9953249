"""Training with half-precision parameters beside the same run with float32 ones and the same half-precision forward.

``python -m tests.torch.half_precision`` prints the table in docs/everyday.md.
"""

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tests.torch import shakespeare
from tests.torch.bases import BY_NAME
from tests.torch.task import digits, mlp, scale

KINDS = ("float32", "half", "mixed", "bare half")  # the parameters; the forward is in half precision in all of them


@dataclasses.dataclass(frozen=True)
class Task:
    model: Callable[[], torch.nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    held: Callable[[], tuple[torch.Tensor, torch.Tensor]]  # what the final train loss is taken over
    mixed: Callable[[torch.nn.Module], Any]  # the part whose parameters stay in float32 where dtypes are mixed


@functools.cache
def noisy_digits():
    """Three labels in ten are random. With clean ones the loss ends at 1e-5, where no two runs agree on per cents."""
    images, labels = digits()
    generator = torch.Generator().manual_seed(0)
    noisy = torch.rand(len(labels), generator=generator) < 0.3
    return images, torch.where(noisy, torch.randint(10, labels.shape, generator=generator), labels)


def digits_batch(step):
    images, labels = noisy_digits()
    rows = torch.randint(len(labels), (128,), generator=torch.Generator().manual_seed(step))
    return images[rows], labels[rows]


TASKS = {
    "digits": Task(lambda: mlp(hidden=16), digits_batch, noisy_digits, lambda model: model[2]),
    "shakespeare": Task(
        shakespeare.Transformer,
        lambda step: shakespeare.windows(step, 8),
        lambda: shakespeare.windows(10**6, 512),
        lambda model: model.head,
    ),
}


def loss_of(model, inputs, targets, dtype):
    with torch.autocast("cpu", dtype=dtype):
        logits = model(inputs)
    return cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def run(
    task: Task, base: str, dtype: torch.dtype, kind: str, *, lr: float = 1.0, steps: int = 1500, start: int = 0
) -> tuple[float, float]:
    """The final train loss, evaluated in float32, and S in the mean over the schedule (or the lr of a bare base).

    The last S alone would compare noise: at the end of a cosine the steps are small, and S then differs by up to 17 %
    between float32 runs whose starts differ by 1e-6. Each ``start`` has parameters that differ by a thousandth.
    """
    model = task.model()
    generator = torch.Generator().manual_seed(start)
    for p in model.parameters() if start else ():
        p.data *= 1 + 1e-3 * torch.randn(p.shape, generator=generator)
    kept = {id(p) for p in (task.mixed(model).parameters() if kind == "mixed" else ())}
    if kind != "float32":
        for p in model.parameters():
            p.data = p.data if id(p) in kept else p.data.to(dtype)
    bare = kind == "bare half"
    optimizer = BY_NAME[base].make(model.parameters(), lr=lr) if bare else BY_NAME[base].wrap(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    effective, weights = 0.0, 0.0
    loss_scale = 1024.0 if dtype == torch.float16 else 1.0
    for step in range(steps):
        optimizer.zero_grad()
        (loss_scale * loss_of(model, *task.batch(step), dtype)).backward()
        for p in model.parameters():
            p.grad.div_(loss_scale)
        optimizer.step()
        weight = schedule.get_last_lr()[0]
        effective, weights = effective + weight * (1.0 if bare else scale(optimizer)), weights + weight
        schedule.step()
    inputs, targets = task.held()
    with torch.no_grad():
        logits = copy.deepcopy(model).float()(inputs)
    return cross_entropy(logits.flatten(0, -2), targets.flatten()).item(), (lr if bare else effective / weights)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write = sys.stdout.write
    write("| task | base | dtype | float32 | half | mixed | bare half, at the learned lr | S, half / float32 |\n")
    write("|---|---|---|---|---|---|---|---|\n")
    for name, task in TASKS.items():
        for base in ("AdamW", "SGD momentum", "Lion"):
            for dtype in (torch.bfloat16, torch.float16):
                results = {kind: run(task, base, dtype, kind) for kind in KINDS[:3]}
                learned = results["float32"][1]
                losses = [results[kind][0] for kind in KINDS[:3]]
                losses.append(run(task, base, dtype, "bare half", lr=learned)[0])
                cells = " | ".join(f"{loss:.4f}" for loss in losses)
                kind = str(dtype).removeprefix("torch.")
                write(f"| {name} | {base} | {kind} | {cells} | {results['half'][1] / learned:.3f} |\n")
                sys.stdout.flush()
