"""Lightning, which asks the module for its optimizer."""

import argparse
import logging
import tempfile

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--steps", type=int, default=80)
args = parser.parse_args()
logging.getLogger("lightning").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.losses = []

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=args.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
torch.manual_seed(0)
model = Classifier()
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        default_root_dir=folder,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))
print(*model.losses[::10], sep="\n")
print("final", sum(model.losses[-10:]) / 10)
