"""diffusers: a denoising UNet on images of digits, with a moving average of its weights.

The loop is that of diffusers' own training scripts; the line that builds the optimizer is the change.
"""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from sklearn.datasets import load_digits
from torch.nn.functional import mse_loss

from mechanic.torch import Mechanic

STEPS, BATCH = 60, 32


def train(make_optimizer, steps: int = STEPS) -> tuple[float, torch.optim.Optimizer, EMAModel]:
    """Returns the mean loss of the last tenth of the steps, the optimizer and the average."""
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
    model = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, add_attention=False, **blocks, **sizes)
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = make_optimizer(model.parameters())
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)
    average = EMAModel(model.parameters(), decay=0.99)
    losses = []
    for _ in range(steps):
        clean = images[torch.randint(len(images), (BATCH,))]
        noise = torch.randn_like(clean)
        timesteps = torch.randint(noise_scheduler.config.num_train_timesteps, (BATCH,))
        loss = mse_loss(model(noise_scheduler.add_noise(clean, noise, timesteps), timesteps).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss.item())
    last = losses[-steps // 10 :]
    return sum(last) / len(last), optimizer, average


def compare() -> tuple[float, float]:
    """The loss at a learned rate, and at the better of two fixed ones."""
    learned, optimizer, _ = train(lambda params: Mechanic(torch.optim.AdamW(params, lr=1.0)))
    print(f"loss {learned:.3f} at a learned rate of {optimizer.scales()['default']:.2g}")
    fixed = {lr: train(lambda params, lr=lr: torch.optim.AdamW(params, lr=lr))[0] for lr in (1e-3, 1e-2)}
    for lr, loss in fixed.items():
        print(f"loss {loss:.3f} at {lr:g}")
    return learned, min(fixed.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    compare()
