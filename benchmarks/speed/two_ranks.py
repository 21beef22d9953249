"""The cost of a step of FSDP2 + Mechanic(AdamW) against FSDP2 + AdamW, interleaved.

torchrun --nproc-per-node 2 -m benchmarks.speed.two_ranks
"""

import argparse
import time
import warnings

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from mechanic.torch import Mechanic

VOCABULARY, WIDTH, BLOCKS, BATCH, LENGTH = 512, 256, 8, 4, 128


def small_gpt():
    torch.manual_seed(0)
    blocks = (
        nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(BLOCKS)
    )
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def timed_step(model, optimizer, tokens):
    """Seconds of the optimizer's step, and of the whole training step."""
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    dist.barrier()
    start = time.perf_counter()
    optimizer.zero_grad()
    hidden = model[0](tokens)
    for block in model[1:-1]:
        hidden = block(hidden, src_mask=mask, is_causal=True)
    nn.functional.cross_entropy(model[-1](hidden).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    dist.barrier()
    middle = time.perf_counter()
    optimizer.step()
    dist.barrier()
    end = time.perf_counter()
    return end - middle, end - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    models = small_gpt(), small_gpt()
    bare, wrapped = (torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models)
    contenders = [(models[0], bare), (models[1], Mechanic(wrapped))]
    steps = range(repeats + 3)
    seconds = [[timed_step(model, optimizer, tokens) for model, optimizer in contenders] for _ in steps]
    seconds = torch.tensor(seconds[3:])  # [repeats, bare and Mechanic, step and whole]
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in models[0].parameters())
        medians = seconds.median(0).values
        ratios = (seconds[:, 1] / seconds[:, 0]).median(0).values
        print(f"{parameters / 1e6:.1f}M parameters, {dist.get_world_size()} ranks, medians of {repeats}")
        for index, part in enumerate(("optimizer step", "training step")):
            bare_time, our_time = medians[:, index].tolist()
            print(f"{part}: {our_time:.3f} s / {bare_time:.3f} s, ratio {ratios[index]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
