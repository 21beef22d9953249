"""``mechanic show``: what a checkpoint holds."""

import argparse
import fractions
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from mechanic.cli.show import show
from mechanic.torch import Mechanic
from tests.cli.running import mechanic
from tests.torch.task import backward, mlp


def trained(steps=20, **options):
    model = mlp()
    groups = [{"params": model[0].parameters(), "tuner": "first"}, {"params": model[2].parameters(), "lr": 0.1}]
    optimizer = Mechanic(torch.optim.AdamW(groups, lr=0.01), **options)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model, optimizer


def assert_described(text, optimizer):
    scales, rates = optimizer.scales(), optimizer.learned_rates()
    assert "Mechanic around AdamW; 2 groups, 4 parameter tensors; format 1" in text
    for index, (name, rate) in enumerate(optimizer.learning_rates().items()):
        learned = (
            f"tuner {name!r} (group {index}): learned rate {rates[name]:.4g} after 20 steps (the peak lr passed was "
        )
        assert learned in text
        assert f"); S is now {scales[name]:.4g}, the effective rate {rate:.4g}" in text
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert f"{4 * count / 1e3:.3g} kB of it Mechanic's" in text
    assert "Delta in float32" in text


def test_a_file_is_shown_with_the_place_of_every_optimizer(tmp_path):
    model, optimizer = trained()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    content = {"model": model.state_dict(), "optimizers": [optimizer.state_dict(), plain.state_dict()], "epoch": 3}
    torch.save(content, tmp_path / "last.pt")
    found = mechanic("show", "last.pt", folder=tmp_path)
    assert found.code == 0, found.err
    ours, other = found.out.split("\n\n")
    assert ours.startswith("last.pt, ['optimizers'][0]\n")
    assert_described(ours, optimizer)
    assert other.startswith("last.pt, ['optimizers'][1]\n  a plain optimizer, without Mechanic; 1 group, 4 parameter")
    assert found.out == show_in(tmp_path, "last.pt") + "\n"


def show_in(folder, name):
    former = os.getcwd()
    os.chdir(folder)
    try:
        return show(name)
    finally:
        os.chdir(former)


def test_a_folder_of_a_framework_is_shown_by_its_files(tmp_path):
    _, optimizer = trained()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.pt")
    (tmp_path / "vocabulary.bin").write_bytes(b"words")
    text = show(str(tmp_path))
    assert text.startswith(f"{tmp_path / 'optimizer.pt'}\n")
    assert_described(text, optimizer)


@pytest.mark.parametrize("layout", ["nested", "flat", "raw"])
def test_a_distributed_checkpoint_is_shown_without_its_weights(layout, tmp_path):
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "flat")
    state = get_state_dict(model, optimizer, options=options) if layout != "raw" else (0, optimizer.state_dict())
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": state[0], "optim": state[1]}, checkpoint_id=tmp_path / "10", no_dist=True)
    text = show(str(tmp_path / "10"))
    assert text.startswith(f"{tmp_path / '10'}, ['optim']\n")
    assert_described(text, optimizer)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"optimizer": Harmful()}, "file.pt")
    with pytest.raises(SystemExit, match=r"could not be read with torch\.load"):
        show("file.pt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(SystemExit, match=r"its index names (posix|nt)\.mkdir"):
        show("folder")
    value = get_state_dict(*trained(1))[1]
    value["param_groups"][0]["lr"] = Harmful()
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"optim": value}, checkpoint_id="values", no_dist=True)
    assert "Mechanic around AdamW" in show("values")
    assert not (tmp_path / "harmed").exists()


def test_frozen_skipped_and_nonfinite_are_said(tmp_path):
    model, optimizer = trained(skip_nonfinite=True, delta=torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "skipped.pt")
    text = show(str(tmp_path / "skipped.pt"))
    assert "1 step skipped for NaN or inf gradients" in text
    assert "Delta in bfloat16" in text
    model, optimizer = trained()
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    optimizer.freeze()
    torch.save(optimizer.state_dict(), tmp_path / "frozen.pt")
    text = show(str(tmp_path / "frozen.pt"))
    assert "after 21 steps, 1 of them with NaN or inf gradients" in text
    assert "frozen: S is no longer tuned" in text
    assert "0 bytes of it Mechanic's" in text


def test_the_arguments_of_a_script_are_read_and_other_classes_named(tmp_path):
    (tmp_path / "run").mkdir()
    state = trained(1)[1].state_dict()
    torch.save({"optimizer": state, "args": argparse.Namespace(lr=1)}, tmp_path / "run" / "last.pt")
    assert "Mechanic around AdamW" in show(str(tmp_path / "run" / "last.pt"))
    torch.save({"optimizer": state, "args": fractions.Fraction(1)}, tmp_path / "run" / "last.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "run" / "model.pt")
    for place in ("run/last.pt", "run"):
        with pytest.raises(
            SystemExit, match=r"last\.pt could not be read .*: it holds a fractions\.Fraction, which"
        ) as said:
            show(str(tmp_path / place))
        assert "\x1b" not in str(said.value)


def test_what_is_no_checkpoint_is_told(tmp_path):
    with pytest.raises(SystemExit, match="there is no file or folder"):
        show(str(tmp_path / "missing.pt"))
    with pytest.raises(SystemExit, match=r"has neither a \.metadata nor a file such as optimizer\.pt"):
        show(str(tmp_path))
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(SystemExit, match=r"no optimizer was found in .*; was only the model saved"):
        show(str(tmp_path / "model.pt"))
    (tmp_path / "text.pt").write_text("some words")
    with pytest.raises(SystemExit, match="could not be read"):
        show(str(tmp_path / "text.pt"))
