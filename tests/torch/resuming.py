"""The situations of test_resume.py, and what the new process does: ``python -m tests.torch.resuming FOLDER``."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import schedulefree
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic.torch import Mechanic, MechanicMuon, Together, layer_groups, mechanic_class
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


def in_backward(model):
    optimizer = adamw(model, delta="int8")
    optimizer.step_in_backward()
    return optimizer


def together(model):
    matrices, vectors = ([p for p in model.parameters() if p.ndim == dims] for dims in (2, 1))
    return Mechanic(Together(torch.optim.SGD(matrices, momentum=0.9), torch.optim.AdamW(vectors, 1.0)), per_group=True)


def own_iterates(model):
    optimizer = Mechanic(schedulefree.AdamWScheduleFree(model.parameters(), lr=1.0))
    optimizer.train()
    return optimizer


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


def of(dtype, wrap=adamw, **options):
    return {"model": lambda seed: mlp(dtype=dtype, seed=seed), "wrap": lambda model: wrap(model, **options)}


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
OTHERS = [  # than to have another base
    Situation("bfloat16", **of(BFLOAT16)),
    Situation("float16", **of(torch.float16)),
    Situation("mixed dtypes", half_mixed, adamw),
    Situation("Delta in bfloat16", **of(FLOAT32, delta=BFLOAT16)),
    Situation("Delta in int8", **of(FLOAT32, delta="int8")),
    Situation("bfloat16, Delta in int8", **of(BFLOAT16, delta="int8")),
    Situation("inside the backward pass", **of(FLOAT32, in_backward)),
    Situation("a tuner per layer", **of(FLOAT32, sgd_per_layer)),
    Situation("several optimizers", **of(FLOAT32, together)),
    Situation("a class", **of(FLOAT32, lambda model: mechanic_class(torch.optim.RAdam)(model.parameters()))),
    *([Situation("MechanicMuon", **of(FLOAT32, MechanicMuon, tuners="role"))] if hasattr(torch.optim, "Muon") else []),
    Situation("own iterates", **of(FLOAT32, own_iterates)),
    Situation("skipping", **of(FLOAT32, skip_nonfinite=True), before_saving=skip_one),
    Situation("frozen", **of(FLOAT32), before_saving=freeze),
    Situation("frozen bfloat16", **of(BFLOAT16), before_saving=freeze),
    Situation("frozen, not linear", **of(FLOAT32, BY_NAME["Adafactor"].wrap), before_saving=freeze),
]
SITUATIONS = [
    *(Situation(base.name, lambda seed, base=base: base.model(seed=seed), base.wrap) for base in BASES),
    Situation("AdamW on copies", **of(FLOAT32, lambda m: on_copies(BY_NAME["AdamW"].make(m.parameters())))),
    *OTHERS,
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
