"""The situations of test_resume.py, and what the new process does: ``python -m tests.torch.resuming FOLDER``."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic.torch import Mechanic, layer_groups
from tests.torch.bases import BASES, BY_NAME
from tests.torch.paths import on_copies
from tests.torch.task import backward, mlp, snapshot, train

STEPS = 8


@dataclasses.dataclass(frozen=True)
class Situation:
    name: str
    model: Callable[[int], torch.nn.Module]  # from a seed
    wrap: Callable[[torch.nn.Module], Mechanic]
    before_saving: Callable[[torch.nn.Module, Mechanic], None] = lambda model, optimizer: None

    def build(self, seed=0):
        model = self.model(seed)
        optimizer = self.wrap(model)
        return model, optimizer, CosineAnnealingLR(optimizer, 2 * STEPS)

    def path(self, folder, kind):
        return Path(folder) / f"{self.name}.{kind}.pt"


def adamw(model, **options):
    return Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0), **options)


def sgd_per_layer(model):
    return Mechanic(torch.optim.SGD(layer_groups(model), lr=1.0))


def half_mixed(seed):
    model = mlp(seed=seed)
    model[0].to(torch.bfloat16)
    return torch.nn.Sequential(_Cast(torch.bfloat16), model[0], model[1], _Cast(torch.float32), model[2])


class _Cast(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs):
        return inputs.to(self.dtype)


def freeze(model, optimizer):
    optimizer.freeze()


def skip_one(model, optimizer):
    backward(model, 99)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()


SITUATIONS = [
    *(Situation(base.name, lambda seed, base=base: base.model(seed=seed), base.wrap) for base in BASES),
    Situation(
        "AdamW on copies", lambda seed: mlp(seed=seed), lambda m: on_copies(BY_NAME["AdamW"].make(m.parameters()))
    ),
    Situation("bfloat16", lambda seed: mlp(dtype=torch.bfloat16, seed=seed), adamw),
    Situation("float16", lambda seed: mlp(dtype=torch.float16, seed=seed), adamw),
    Situation("mixed dtypes", half_mixed, adamw),
    Situation("a tuner per layer", lambda seed: mlp(seed=seed), sgd_per_layer),
    Situation("skipping", lambda seed: mlp(seed=seed), lambda m: adamw(m, skip_nonfinite=True), skip_one),
    Situation("frozen", lambda seed: mlp(seed=seed), adamw, freeze),
    Situation("frozen bfloat16", lambda seed: mlp(dtype=torch.bfloat16, seed=seed), adamw, freeze),
    Situation("frozen, not linear", lambda seed: mlp(seed=seed), BY_NAME["Adafactor"].wrap, freeze),
]


def resume_all(folder):
    """Load every checkpoint in a new process and continue."""
    for situation in SITUATIONS:
        parts = model, optimizer, schedule = situation.build(seed=1)
        for part, state in zip(parts, torch.load(situation.path(folder, "checkpoint"), weights_only=True), strict=True):
            part.load_state_dict(state)
        train(model, optimizer, STEPS, first=STEPS, scheduler=schedule)
        torch.save(snapshot(model, optimizer), situation.path(folder, "resumed"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    resume_all(sys.argv[1])
