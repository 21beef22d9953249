"""``python -m benchmarks try``: Mechanic on a training function of one's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
from benchmarks.trial import steps_to, try_out

ROOT = Path(__file__).parents[2]
TRAINING = """
import torch
from sklearn.datasets import load_digits

calls = []

def train(make_optimizer):
    calls.append(make_optimizer)
    inputs, targets = (torch.tensor(array) for array in load_digits(return_X_y=True))
    model = torch.nn.Linear(64, 10)
    optimizer = make_optimizer(model.parameters(), weight_decay=0.01)
    for step in range(60):
        rows = torch.randint(len(targets), (32,))
        loss = torch.nn.functional.cross_entropy(model(inputs[rows].float() / 16), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()

def forgetful(make_optimizer):
    yield 1.0

def silent(make_optimizer):
    return None

def wordy(make_optimizer):
    yield "a loss"

def empty(make_optimizer):
    return iter(())
"""


@pytest.fixture
def training(tmp_path):
    path = tmp_path / "my_training.py"
    path.write_text(TRAINING, encoding="utf-8")
    return path


def run(training, capsys, lr=0.003, function="train", grid=False, base="torch.optim.AdamW"):
    try_out(f"{training}:{function}", base, lr, grid=grid, out=training.parent / "out")
    return capsys.readouterr().out


def test_one_command_answers_in_a_table_and_a_picture(training):
    command = [sys.executable, "-m", "benchmarks", "try", f"{training}:train", "--lr", "0.003", "--out", "found"]
    result = subprocess.run(
        command,
        cwd=training.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert "Mechanic(AdamW)" in result.stderr  # the bar
    lines = result.stdout.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:] == ["Mechanic(AdamW)", "AdamW"]
    for word in ("Learned: ", "Worth: ", "Cost: "):
        assert any(line.startswith(word) for line in lines)
    (picture,) = (training.parent / "found").glob("*.png")
    assert picture.stat().st_size > 20_000


def test_a_grid_grows_beyond_its_edge_and_runs_only_what_is_new(training, capsys):
    run(training, capsys, lr=1e-5)
    (records,) = (training.parent / "out").glob("*.jsonl")
    before = records.read_text()
    output = run(training, capsys, lr=1e-5, grid=True)
    assert "not run again" in output
    assert records.read_text().startswith(before)
    found = [json.loads(line) for line in records.read_text().splitlines()]
    plain = sorted((r["lr"], r["final"]) for r in found if r["contender"] == "AdamW")
    assert len(plain) > 5  # 1e-5 is far too small here
    assert f"at {plain[-1][0]:g}, found in {len(plain)} runs." in output
    training.write_text(TRAINING + "\n# edited")
    assert "not run again" not in run(training, capsys, lr=1e-5)


def test_the_same_seed_is_set_before_every_run_and_the_loss_is_what_was_yielded(training, capsys):
    run(training, capsys)
    (records,) = (training.parent / "out").glob("*.jsonl")
    learned, own = (json.loads(line) for line in records.read_text().splitlines())
    assert learned["curve"]["train_loss"][0] == own["curve"]["train_loss"][0]
    assert own["steps"] == len(own["curve"]["train_loss"]) == 60
    assert own["final"] == pytest.approx(sum(own["curve"]["train_loss"][-6:]) / 6, rel=1e-4)
    assert learned["final"] < own["final"]
    assert learned["state_bytes"] > own["state_bytes"]
    assert steps_to(learned, own["final"]) < 60


def test_a_learning_rate_that_diverges_is_said_to(training, capsys):
    output = run(training, capsys, lr=1e38, base="torch.optim.SGD")
    assert "| SGD | 1e+38 (yours) | diverged |" in output
    assert "yours diverged" in output


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("forgetful", "has not called the optimizer factory"),
        ("silent", "has returned None; it has to yield the loss"),
        ("wordy", "step 1 has yielded a str"),
        ("empty", "has yielded no loss"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_a_function_that_does_not_fit_is_told_what_is_wanted(function, message, training, capsys):
    with pytest.raises(SystemExit, match=message):
        run(training, capsys, function=function)


@pytest.mark.parametrize(
    ("target", "base", "message"),
    [
        ("my_training", "torch.optim.AdamW", "name a file and a function in it"),
        ("nowhere.py:train", "torch.optim.AdamW", "there is no file nowhere.py"),
        ("{training}:train", "AdamW", "--base is the path of an optimizer class"),
    ],
)
def test_what_cannot_be_found_is_named(target, base, message, training):
    with pytest.raises(SystemExit, match=message):
        try_out(target.format(training=training), base, 0.1, grid=False, out=training.parent / "out")
