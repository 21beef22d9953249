"""timm: its optimizer factory, its schedules and layer decay, with the learning rate learned."""

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.nn.functional import cross_entropy

from mechanic.integrations.timm import register

STEPS = 60


def train(opt: str, lr: float) -> tuple[float, torch.optim.Optimizer]:
    """A small ResNet on 8 x 8 digits; returns the mean loss of the last tenth, and the optimizer."""
    torch.manual_seed(0)
    images, labels = torch.tensor(load_digits().images).float()[:, None] / 16, torch.tensor(load_digits().target)
    model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
    optimizer = create_optimizer_v2(model, opt, lr=lr, weight_decay=0.05, layer_decay=0.8)
    # Where a schedule takes absolute numbers, they are relative to the lr above.
    schedule = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=4, warmup_lr_init=0.01 * lr, t_in_epochs=False)
    losses = []
    for step in range(STEPS):
        rows = torch.randint(len(labels), (64,))
        loss = cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step_update(step + 1)
        losses.append(loss.item())
    return sum(losses[-STEPS // 10 :]) / (STEPS // 10), optimizer


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("registered:", ", ".join(register()))  # the change, with the name below
    for opt in ("mechanicadamw", "mechaniclion"):
        loss, optimizer = train(opt, lr=1.0)
        print(f"{opt}: loss {loss:.3f}, learned rate {optimizer.scales()['default']:.2g}")
