"""Save, load in a new process, continue: bit for bit the uninterrupted run, for every base."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from bases import BASES, Base, every_base
from task import same_bits, snapshot, train

STEPS = 8


def build(base: Base, seed=0):
    model = base.model(seed=seed)
    optimizer = base.wrap(model)
    return model, optimizer, CosineAnnealingLR(optimizer, 2 * STEPS)


def path_of(base: Base, folder, kind):
    return Path(folder) / f"{BASES.index(base)}.{kind}.pt"


def resume_all(folder):
    """What the new process does."""
    for base in BASES:
        model, optimizer, schedule = build(base, seed=1)
        saved = torch.load(path_of(base, folder, "checkpoint"), weights_only=True)
        for part, state in zip((model, optimizer, schedule), saved, strict=True):
            part.load_state_dict(state)
        train(model, optimizer, STEPS, first=STEPS, scheduler=schedule)
        torch.save(snapshot(model, optimizer), path_of(base, folder, "resumed"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every base interrupted and uninterrupted: {name: (resumed, uninterrupted)}."""
    folder = tmp_path_factory.mktemp("resume")
    uninterrupted = {}
    for base in BASES:
        model, optimizer, schedule = build(base)
        train(model, optimizer, STEPS, scheduler=schedule)
        parts = model, optimizer, schedule
        torch.save([part.state_dict() for part in parts], path_of(base, folder, "checkpoint"))
        train(model, optimizer, STEPS, first=STEPS, scheduler=schedule)
        uninterrupted[base.name] = snapshot(model, optimizer)
    subprocess.run([sys.executable, __file__, folder], check=True, timeout=120, cwd=Path(__file__).parent)
    resumed = {base.name: torch.load(path_of(base, folder, "resumed"), weights_only=True) for base in BASES}
    return {name: (resumed[name], uninterrupted[name]) for name in uninterrupted}


@every_base
def test_resume_continues_bit_for_bit(base: Base, runs):
    assert same_bits(*runs[base.name])


if __name__ == "__main__":
    torch.set_num_threads(1)
    resume_all(sys.argv[1])
