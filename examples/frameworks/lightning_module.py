"""Lightning: a LightningModule with clipping, accumulation, a schedule per step, a checkpoint and going on from it."""

import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from mechanic.integrations.lightning import ScaleMonitor
from mechanic.torch import Mechanic

STEPS = 84


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        loss = cross_entropy(self.layers(inputs), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = Mechanic(torch.optim.AdamW(self.parameters(), lr=1.0))  # the change
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def digits() -> DataLoader:
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    return DataLoader(data, batch_size=64, drop_last=True)  # 14 steps of two batches an epoch


def build(folder: str | Path, steps: int = STEPS, **options) -> lightning.Trainer:
    monitors = [LearningRateMonitor("step"), ScaleMonitor()]  # the schedule, and what is learned
    return lightning.Trainer(
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=14,
        logger=CSVLogger(folder),
        callbacks=[*monitors, ModelCheckpoint(folder, filename="{step}", every_n_train_steps=28, save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for checkpoint in (None, f"{folder}/step=28.ckpt"):
            trainer = build(folder)
            trainer.fit(Classifier(), digits(), ckpt_path=checkpoint)
            start = Path(checkpoint).name if checkpoint else "the start"
            print(f"from {start}: loss {trainer.callback_metrics['loss']:.5f}")
        print(Path(trainer.logger.log_dir, "metrics.csv").read_text())
