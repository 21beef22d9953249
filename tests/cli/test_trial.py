"""``mechanic try``: Mechanic on a training function of one's own."""

import json

import pytest

from mechanic.cli.trial import try_out
from mechanic.cli.verdict import steps_to, verdict
from tests.cli.running import mechanic

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

def two_groups(make_optimizer):
    x, y = (torch.ones(2, requires_grad=True) for _ in "xy")
    make = [make_optimizer([{"params": [x]}, {"params": [y], "lr": 1e-2}], 1e-3), make_optimizer([y], lr=1e-3)]
    for step in range(10):
        for optimizer in make:
            optimizer.zero_grad()
        (x.square().sum() + y.square().sum()).backward()
        for optimizer in make:
            optimizer.step()
        yield -1.0 - step
    print("rates", *(f"{group['lr']:g}" for group in make[0].param_groups))

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


def run(training, capsys, lr=0.003, function="train", grid=False, base="torch.optim.AdamW", steps=None):
    try_out(f"{training}:{function}", base, lr, grid=grid, steps=steps, out=training.parent / "out")
    return capsys.readouterr().out


def test_one_command_answers_in_a_table_a_verdict_and_a_picture(training):
    found = mechanic("try", f"{training}:train", "--lr", "0.003", "--out", "found", folder=training.parent)
    assert found.code == 0, found.err
    assert "run 1 of 2, Mechanic(AdamW)" in found.err  # the bar
    assert "60/60" in found.err
    lines = found.out.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")] == ["", "Mechanic(AdamW)", "AdamW"]
    assert any(line.startswith("Cost: ") for line in lines)
    assert any(line.startswith("Mechanic beat your learning rate (") for line in lines)
    (picture,) = (training.parent / "found").glob("*.png")
    assert picture.stat().st_size > 20_000


def test_without_the_extra_it_answers_all_the_same(training, monkeypatch, capsys):
    for name in ("tqdm", "mechanic.cli.picture"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    output = run(training, capsys, steps=5)
    assert 'pip install "mechanic[cli]"' in output
    assert "of 5 " in output


def test_a_grid_grows_beyond_its_edge_and_runs_only_what_is_new(training, capsys):
    run(training, capsys, lr=1e-5)
    (records,) = (training.parent / "out").glob("*.jsonl")
    before = records.read_text()
    output = run(training, capsys, lr=1e-5, grid=True)
    assert "are used again" in output
    assert records.read_text().startswith(before)
    found = [json.loads(line) for line in records.read_text().splitlines()]
    plain = sorted((r["lr"], r["final"]) for r in found if r["method"] == "AdamW")
    assert len(plain) > 5  # 1e-5 is far too small here
    assert f"{plain[-2][0]:g} reaches" in output or f"{plain[-1][0]:g} reaches" in output
    training.write_text(TRAINING + "\n# edited")
    assert "are used again" not in run(training, capsys, lr=1e-5)


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


def test_groups_keep_their_ratios_and_several_optimizers_their_rates(training, capsys):
    text = run(training, capsys, lr=0.003, function="two_groups", base="torch.optim.SGD")
    assert "rates 1 10\nrates 0.003 0.03\n" in text
    assert "| 0.003 (yours)" in text
    assert "10 of 10" in text  # the steps to a loss below 0
    (book,) = (training.parent / "out").glob("*.jsonl")
    learned, _ = (json.loads(line)["learned"] for line in book.read_text().splitlines())
    assert list(learned) == ["0 default", "1 default"]


def test_a_learning_rate_that_diverges_is_said_to(training, capsys):
    output = run(training, capsys, lr=1e38, base="torch.optim.SGD")
    assert "1e+38 (yours)" in output
    assert "| diverged " in output
    assert "Your learning rate diverged, and Mechanic reached 0." in output


def record(method, lr, final, learned=()):
    curve = {"step": [1, 2], "train_loss": [2.0, 1.0]}
    return {"method": method, "lr": lr, "final": final, "learned": dict(learned), "curve": curve}


@pytest.mark.parametrize(
    ("learned", "rate", "plain", "sentence"),
    [
        (
            *(0.468, 0.0013, {0.001: 0.468, 0.01: 0.3, 0.0316: 0.253, 0.1: 0.5}),
            "Mechanic matched your learning rate (0.468 against 0.468), but the grid found a better learning rate: "
            "0.0316 reaches 0.253. The learned rate, 0.0013, was 24 times too small.",
        ),
        (
            0.05,
            0.2,
            {0.003: 0.327},
            "Mechanic beat your learning rate (0.05 against 0.327) with a learned rate of 0.2.",
        ),
        (
            *(0.5, 0.2, {0.003: 0.4, 0.01: 0.45, 0.001: 0.6}),
            "Mechanic lost to your learning rate (0.5 against 0.4), and yours was the best of the grid. The learned "
            "rate, 0.2, was 67 times too large.",
        ),
        (
            *(0.5, 0.012, {0.003: 0.4, 0.01: 0.3, 0.1: 0.6}),
            "Mechanic lost to your learning rate (0.5 against 0.4), and the grid found a better learning rate: 0.01 "
            "reaches 0.3. The learned rate, 0.012, was close to it all the same.",
        ),
        (
            *(0.3, 0.012, {0.003: 0.4, 0.01: 0.301, 0.1: 0.6}),
            "Mechanic beat your learning rate (0.3 against 0.4), and the best of the grid does no better (0.01 reaches "
            "0.301).",
        ),
        (
            *(0.3, 0.012, {0.003: 0.4, 0.01: 0.35, 0.001: 0.6}),
            "Mechanic beat your learning rate (0.3 against 0.4), and no learning rate of the grid did as well (0.01 "
            "reaches 0.35). The best learning rate is at the edge of the grid, so there may be a better one.",
        ),
        (None, 0.1, {0.003: 0.4}, "Mechanic diverged here, while 0.003 reaches 0.4. Please report it with this file."),
        (None, 0.1, {0.003: None}, "Nothing trained: Mechanic and every learning rate tried diverged."),
        (0.3, 0.1, {9.0: None}, "Your learning rate diverged, and Mechanic reached 0.3 with a learned rate of 0.1."),
        (-5.0, 0.1, {9.0: -4.0}, "Mechanic beat your learning rate (-5 against -4) with a learned rate of 0.1."),
    ],
)
def test_the_verdict_is_plain_also_where_mechanic_loses(learned, rate, plain, sentence):
    records = [record("Mechanic(AdamW)", 1.0, learned, {"default": rate})]
    assert verdict(records + [record("AdamW", lr, final) for lr, final in plain.items()]) == sentence


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
