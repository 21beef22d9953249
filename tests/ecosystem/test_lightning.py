"""Lightning: clipping, accumulation, schedules, checkpoints and loggers."""

import csv
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="has an environment of its own: make test-ecosystem")
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_module import Classifier, build, digits
from mechanic.integrations.lightning import ScaleMonitor
from mechanic.torch import MechanicAdamW, MechanicMuon

STEPS, SAVED_AFTER = 56, 28


class Plain(Classifier):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class WithMuon(Classifier):
    def configure_optimizers(self):
        return MechanicMuon(self)


def fit(model, folder, **options):
    trainer = build(folder, STEPS)
    if isinstance(model, Plain):
        trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ != "ScaleMonitor"]
    trainer.fit(model, digits(), **options)
    return [p.detach().clone() for p in model.parameters()], trainer


@pytest.mark.parametrize("module", [Plain, Classifier, WithMuon])
def test_resume_is_bitwise_as_lightnings_own_is(module, tmp_path):
    expected, _ = fit(module(), tmp_path)
    found, _ = fit(module(), tmp_path, ckpt_path=str(tmp_path / f"step={SAVED_AFTER}.ckpt"))
    for a, b in zip(found, expected, strict=True):
        assert a.equal(b)


def test_the_loop_is_that_of_plain_pytorch(tmp_path):
    """Accumulation, clipping and the schedule come to Mechanic as they do in a loop by hand."""
    found, trainer = fit(Classifier(), tmp_path)
    model = Classifier()
    configured = model.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    done = 0
    while done < STEPS:
        for index, (inputs, targets) in enumerate(digits()):
            (torch.nn.functional.cross_entropy(model.layers(inputs), targets) / 2).backward()
            if index % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                done += 1
    assert trainer.optimizers[0].scales() == pytest.approx(optimizer.scales(), rel=1e-5)
    for a, b in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-5)


def test_scale_and_rate_are_logged_with_the_loss_and_lightnings_lr(tmp_path):
    _, trainer = fit(Classifier(), tmp_path)
    rows = list(csv.DictReader(Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()))
    steps = {
        key: [int(row["step"]) for row in rows if row.get(key)]
        for key in ("loss", "lr-Mechanic", "mechanic/scale", "mechanic/lr")
    }
    assert steps["loss"] == steps["mechanic/scale"] == steps["mechanic/lr"] == [13, 27, 41, 55]
    assert set(steps["lr-Mechanic"]) == set(steps["loss"])
    read = {key: [float(row[key]) for row in rows if row.get(key)] for key in steps}
    shape = dict(zip(steps["lr-Mechanic"], read["lr-Mechanic"], strict=True))  # Lightning's monitor writes it twice
    for step, scale, rate in zip(steps["loss"], read["mechanic/scale"], read["mechanic/lr"], strict=True):
        assert rate == pytest.approx(scale * shape[step])


class TwoOptimizers(Classifier):
    """Optimized by hand, with a named tuner for each optimizer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        first, *_, last = (layer for layer in self.layers if list(layer.parameters()))
        named = {"first": first, "last": last}
        return [MechanicAdamW([{"params": layer.parameters(), "tuner": name}]) for name, layer in named.items()]

    def training_step(self, batch):
        inputs, targets = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.cross_entropy(self.layers(inputs), targets))
            optimizer.step()


@pytest.mark.parametrize("every", [0, 4])
def test_several_optimizers_are_logged_on_the_batches_on_which_lightning_logs(every, tmp_path):
    options = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_steps=32,
        log_every_n_steps=every,
        logger=CSVLogger(tmp_path),
        callbacks=[ScaleMonitor()],
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(TwoOptimizers(), digits())
    metrics = Path(trainer.logger.log_dir, "metrics.csv")
    rows = list(csv.DictReader(metrics.read_text().splitlines())) if metrics.exists() else []
    steps = [[int(row["step"]) for row in rows if row.get(f"mechanic/scale/{name}")] for name in ("first", "last")]
    assert steps == [[3, 7, 11, 15] if every else []] * 2
