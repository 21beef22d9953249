"""DeepSpeed: ZeRO stage 1 or 2 on several processes.

    torchrun --nproc-per-node 2 examples/frameworks/deepspeed_zero.py --stage 2

Two things are needed. ``process_group``: every rank holds a part of the parameters in plain tensors, and the sums go
over all of them. One param group, or a tuner for each: DeepSpeed steps its optimizer group by group. What is not right
is refused with a message, stage 3 among it; there ``fully_shard`` (FSDP2) is the way.
"""

import argparse

import deepspeed
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from mechanic.torch import Mechanic

BATCH = 32  # of all processes together


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0), process_group=dist.group.WORLD)  # the change
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "zero_optimization": {"stage": arguments.stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(arguments.steps):
        inputs = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        loss = mse_loss(engine(inputs), inputs.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.2f}, scale {optimizer.scales()['default']:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
