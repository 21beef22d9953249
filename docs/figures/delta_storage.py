"""What Delta in fewer bytes takes and what it costs: the tables of memory.md.

``bytes`` measures what three steps leave and what the fourth takes at most, with torch's allocator. ``time`` measures
the processor time of a step on one thread. ``digits`` trains an MLP on scikit-learn's digits. ``losses`` trains tasks
of the suite, whose data it needs; without names, all that are listed below.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.suite.contenders import base_class
from benchmarks.suite.loop import Training
from benchmarks.suite.measure import evaluate
from benchmarks.suite.record import EVALUATED_AT, final
from benchmarks.suite.recordbook import RECORDS, RecordBook
from benchmarks.suite.tasks import TASKS
from mechanic.torch import Mechanic
from tests.torch.memory import allocations
from tests.torch.task import mlp, train

STORAGES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": "int8"}
RUNS = ["gpt-shakespeare", "cnn-mnist", "mlp-adult", "mlp-fashion", "convex-satimage"]
SEEDS = (0, 1, 2)


def print_bytes():
    """Per parameter, of 24 matrices with a bias each (6.3 million), without parameters and gradients."""
    for dtype in (torch.float32, torch.bfloat16):
        for name, delta in {"bare AdamW": None, **STORAGES}.items():
            shapes = [(512, 512), (512,)] * 24
            params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
            base = torch.optim.AdamW(params, lr=1.0, fused=True)
            optimizer = base if name == "bare AdamW" else Mechanic(base, delta=delta)
            for p in params:
                p.grad = torch.ones_like(p)
            elements = sum(p.numel() for p in params)
            kept, _ = allocations(lambda: [optimizer.step() for _ in range(3)])  # noqa: B023
            _, most = allocations(optimizer.step)
            print(
                f"{dtype} {name:10s} kept {kept / elements:6.3f}  at most {most / 1e6:5.1f} MB in passing", flush=True
            )


def print_time():
    """Nanoseconds per parameter, the least of several steps that take turns; of a small transformer's shapes."""
    shapes = [*[(512, 512)] * 24, *[(2048, 512)] * 6, *[(512,)] * 40, (10_000, 512)]
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    for fused in (False, True):
        optimizers = {}
        for name, delta in {"bare AdamW": None, **STORAGES}.items():
            params = [torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
            for p in params:
                p.grad = torch.randn_like(p)
            base = torch.optim.AdamW(params, lr=1.0, fused=fused)
            optimizers[name] = base if name == "bare AdamW" else Mechanic(base, delta=delta)
        least = dict.fromkeys(optimizers, float("inf"))
        for _ in range(8):
            for name, optimizer in optimizers.items():
                start = time.process_time()
                optimizer.step()
                least[name] = min(least[name], time.process_time() - start)
        found = ", ".join(f"{name} {1e9 * seconds / elements:.1f}" for name, seconds in least.items())
        print(f"{'fused' if fused else 'foreach'}: {found} ns per parameter", flush=True)


def print_digits(steps=300):
    """The final train loss of three seeds, to the end of a cosine."""
    bases = {"AdamW": (torch.optim.AdamW, {}), "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9})}
    for base, (cls, options) in bases.items():
        for name, delta in STORAGES.items():
            losses = []
            for seed in SEEDS:
                model = mlp(seed=seed)
                optimizer = Mechanic(cls(model.parameters(), lr=1.0, **options), delta=delta)
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
                losses.append(train(model, optimizer, steps, first=1000 * seed, scheduler=schedule))
            each = " ".join(f"{loss:.4f}" for loss in losses)
            print(f"digits {base} {name:9s} loss {each}  mean {statistics.mean(losses):.4f}", flush=True)


def final_loss(task, base, delta, seed):
    """The mean of the last three evaluations, and the loss at the start."""
    due = {round(share * task.steps) for share in (0.0, *EVALUATED_AT[-3:])}

    def build(model):
        return Mechanic(base_class(base, task)(model.parameters(), lr=1.0), delta=delta)

    losses = [evaluate(task, model)["train_loss"] for step, model, _ in Training(task, build, seed) if step in due]
    return statistics.mean(losses[1:]), losses[0]


def print_losses(names):
    records = RecordBook(RECORDS).records
    for name in names or RUNS:
        task = TASKS[name]
        for base in ("adamw", "sgd"):
            rows = {storage: [] for storage in STORAGES}
            for seed in SEEDS:
                swept = [r for run, r in records.items() if (run.task, run.contender, run.seed) == (name, base, seed)]
                tuned = min(final(record) for record in swept)
                for storage, delta in STORAGES.items():
                    loss, start = final_loss(task, base, delta, seed)
                    rows[storage].append((loss, 100 * (loss - tuned) / (start - tuned)))
            for storage, found in rows.items():
                losses = " ".join(f"{loss:.4f}" for loss, _ in found)
                gaps = " ".join(f"{gap:5.1f}" for _, gap in found)
                mean = statistics.mean(gap for _, gap in found)
                print(f"{name} {base} {storage:9s} loss {losses}  gap in % {gaps}  mean {mean:5.2f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, *names = sys.argv[1:]
    if command == "losses":
        print_losses(names)
    else:
        {"bytes": print_bytes, "time": print_time, "digits": print_digits}[command]()
