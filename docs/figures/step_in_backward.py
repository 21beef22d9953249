"""What stepping inside the backward pass saves, and what it costs: the tables of memory.md.

``bytes`` measures the most that a whole training step of a GPT takes, by torch's allocator, and its processor time on
one thread. ``losses`` trains tasks of the suite, whose data it needs, with and without; without names, all that are
listed below.
"""

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from delta_storage import print_gaps

from benchmarks.suite.models import GPT
from mechanic.torch import Mechanic
from tests.torch.memory import allocations

MODES = {"usual": False, "in backward()": True}
RUNS = ["mlp-fashion", "cnn-mnist", "gpt-shakespeare"]


def print_bytes(rounds=10):
    """Of six layers and 16 tokens, so that activations are few; without what is kept between steps."""
    tokens = torch.randint(65, (1, 17), generator=torch.Generator().manual_seed(0))
    for how in ("fused", "foreach"):
        steps, most = {}, {}
        for mode, in_backward in MODES.items():
            torch.manual_seed(0)
            model = GPT(vocabulary=65, length=16, width=384, layers=6, heads=8, dropout=0.0)
            optimizer = wrapped(torch.optim.AdamW(model.parameters(), lr=1.0, **{how: True}), in_backward)
            steps[mode] = step_of(model, optimizer, tokens)
            steps[mode]()
            _, most[mode] = allocations(steps[mode])
        seconds = {mode: [] for mode in MODES}
        for _ in range(rounds):  # by turns: the machine may have other work
            for mode, step in steps.items():
                start = time.process_time()
                step()
                seconds[mode].append(time.process_time() - start)
        gradients = sum(4 * p.numel() for p in model.parameters())
        for mode in MODES:
            took = 1e3 * statistics.median(seconds[mode])
            print(f"AdamW {how:7s} {mode:13s} at most {most[mode] / 1e6:5.1f} MB, {took:4.0f} ms", flush=True)
        saved = most["usual"] - most["in backward()"]
        print(f"saved {saved / 1e6:.1f} MB; the gradients are {gradients / 1e6:.1f} MB", flush=True)


def step_of(model, optimizer, tokens):
    def step():
        torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def wrapped(base, in_backward):
    optimizer = Mechanic(base)
    optimizer.step_in_backward(in_backward)
    return optimizer


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, *names = sys.argv[1:]
    if command == "losses":
        print_gaps(names or RUNS, {mode: partial(wrapped, in_backward=way) for mode, way in MODES.items()})
    else:
        {"bytes": print_bytes}[command]()
