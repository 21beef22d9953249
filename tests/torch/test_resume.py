"""Save, load in a new process, continue: bit for bit the uninterrupted run, for every base and every situation."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.torch.resuming import SITUATIONS, STEPS
from tests.torch.task import same_bits, snapshot, train

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every situation interrupted and uninterrupted: {name: (resumed, uninterrupted)}."""
    folder = tmp_path_factory.mktemp("resume")
    uninterrupted = {}
    for situation in SITUATIONS:
        parts = model, optimizer, schedule = situation.build()
        train(model, optimizer, STEPS, scheduler=schedule)
        situation.before_saving(model, optimizer)
        torch.save([part.state_dict() for part in parts], situation.path(folder, "checkpoint"))
        train(model, optimizer, STEPS, first=STEPS, scheduler=schedule)
        uninterrupted[situation.name] = snapshot(model, optimizer)
    subprocess.run([sys.executable, "-m", "tests.torch.resuming", folder], check=True, timeout=120, cwd=ROOT)
    resumed = {s.name: torch.load(s.path(folder, "resumed"), weights_only=True) for s in SITUATIONS}
    return {name: (resumed[name], uninterrupted[name]) for name in uninterrupted}


@pytest.mark.long
@pytest.mark.parametrize("name", [situation.name for situation in SITUATIONS])
def test_resume_continues_bit_for_bit(name, runs):
    assert same_bits(*runs[name])
