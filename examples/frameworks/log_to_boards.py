"""A loop of one's own that logs to TensorBoard and to Weights & Biases (offline): what to write per step.

``tensorboard --logdir logs`` shows the one, ``wandb sync logs/wandb/offline-run-*`` uploads the other.
"""

import torch
import wandb
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.tensorboard import SummaryWriter

from mechanic.integrations import readings
from mechanic.torch import Mechanic, layer_groups

STEPS = 60


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = Mechanic(torch.optim.AdamW(layer_groups(model), lr=1.0))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    board = SummaryWriter("logs")
    with wandb.init(project="mechanic", mode="offline", dir="logs", settings={"console": "off"}) as run:
        for step in range(STEPS):
            rows = torch.randint(len(targets), (64,))
            loss = cross_entropy(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:  # reading waits for the device, so not on every step
                values = {"loss": loss.item(), **readings(optimizer)}
                run.log(values, step=step)
                for name, value in values.items():
                    board.add_scalar(name, value, step)
                print(f"step {step + 1}:", ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
            schedule.step()
    board.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
