"""Accelerate: a loop on several processes, a checkpoint, and a restart where it left off.

    torchrun --nproc-per-node 2 examples/frameworks/accelerate_loop.py --checkpoints /tmp/checkpoints

Nothing is Mechanic's but the line that builds the optimizer. On GPUs the parameters are sharded with FSDP2; on CPUs
Accelerate shards nothing, and this runs as DDP.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from mechanic.integrations import readings
from mechanic.torch import Mechanic

ACCUMULATED = 2  # batches per step
HIDDEN = 32


def sharding() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000)


def make_accelerator() -> Accelerator:
    on_gpu = torch.cuda.is_available()
    return Accelerator(
        cpu=not on_gpu,
        fsdp_plugin=sharding() if on_gpu else None,
        gradient_accumulation_steps=ACCUMULATED,
        # A batch is that of all processes together; without this a schedule also runs ahead by their number.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )


def train(accelerator: Accelerator, checkpoints: Path, steps: int, *, saved_every: int = 9) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))  # the change
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=5)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    loader = DataLoader(data, batch_size=48)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    done = max((int(path.name) for path in checkpoints.glob("*")), default=0)
    if done:
        accelerator.load_state(str(checkpoints / str(done)))
    for inputs, targets in accelerator.skip_first_batches(loader, done * ACCUMULATED):
        if done == steps:
            break
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        done += 1
        if done % 3 == 0:
            learned = ", ".join(f"{key} {value:.4f}" for key, value in readings(optimizer).items())
            accelerator.print(f"step {done}: loss {loss.item():.3f}, {learned}")
        if done % saved_every == 0:
            accelerator.save_state(str(checkpoints / str(done)))
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=18)
    arguments = parser.parse_args()
    accelerator = make_accelerator()
    train(accelerator, arguments.checkpoints, arguments.steps)
    accelerator.end_training()
