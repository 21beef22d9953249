"""Save, load in a new process, or copy, and continue: bit for bit the uninterrupted run, in every situation."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.torch.resuming import OTHERS, SITUATIONS, STEPS
from tests.torch.task import same_bits, snapshot, train

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_resume_continues_bit_for_bit_in_every_situation(tmp_path):
    uninterrupted = {}
    for situation in SITUATIONS:
        parts = model, optimizer, schedule = situation.build()
        train(model, optimizer, STEPS, scheduler=schedule)
        situation.before_saving(model, optimizer)
        torch.save([part.state_dict() for part in parts], situation.path(tmp_path, "checkpoint"))
        train(model, optimizer, STEPS, first=STEPS, scheduler=schedule)
        uninterrupted[situation.name] = snapshot(model, optimizer)
    subprocess.run([sys.executable, "-m", "tests.torch.resuming", tmp_path], check=True, timeout=120, cwd=ROOT)
    resumed = {s.name: torch.load(s.path(tmp_path, "resumed"), weights_only=True) for s in SITUATIONS}
    assert [name for name, ended in uninterrupted.items() if not same_bits(resumed[name], ended)] == []


@pytest.mark.parametrize("situation", OTHERS, ids=lambda situation: situation.name)
def test_copies_go_on_by_themselves(situation):
    """Of every base they do in test_every_base.py."""
    pair = model, optimizer, _ = situation.build()
    train(model, optimizer, 4)
    situation.before_saving(model, optimizer)
    twins = copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))
    for twin, other, _ in twins:
        assert type(other) is type(optimizer)
        train(twin, other, 4, first=4)
    train(model, optimizer, 4, first=4)
    for twin, other, _ in twins:
        assert same_bits(snapshot(model, optimizer), snapshot(twin, other))
