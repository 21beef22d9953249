"""What Delta in fewer bytes takes and what it costs: the tables of memory.md.

``bytes`` measures what three steps leave and what the fourth takes at most, with torch's allocator; of bases in few
bits, if torchao and bitsandbytes are installed. It takes names of dtypes. ``half`` trains an MLP with bfloat16
parameters and prints its losses, ``state`` its train loss with the base's state in float32 and in bfloat16.
``time`` measures the processor time of a step on one thread. ``digits`` trains an MLP on scikit-learn's digits.
``losses`` trains tasks of the suite, whose data it needs; without names, all that are listed below. ``tasks`` trains
three of them with bfloat16 parameters, with Delta in float32 and in bfloat16.
"""

import functools
import importlib
import importlib.util
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
from mechanic.torch import Mechanic, lists
from mechanic.torch import base as bases
from tests.torch.bases import BY_NAME
from tests.torch.half_precision import digits_batch, noisy_digits
from tests.torch.memory import allocations
from tests.torch.task import mlp, train

STORAGES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": "int8"}
RUNS = ["gpt-shakespeare", "cnn-mnist", "mlp-adult", "mlp-fashion", "convex-satimage"]
SEEDS = (0, 1, 2)
RANDOM = torch.Generator().manual_seed(0)


def fused_adamw(params):
    return torch.optim.AdamW(params, lr=1.0, fused=True)


def low_bit_bases():
    """By name, as far as their packages are installed. torchao compiles its step, which is not done here."""
    found = {}
    for module, names in (
        ("torchao", ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
        ("bitsandbytes", ("AdamW8bit", "Lion8bit")),
    ):
        if importlib.util.find_spec(module):
            optim = importlib.import_module(f"{module}.optim")
            found |= {f"{module} {name}": functools.partial(getattr(optim, name), lr=1.0) for name in names}
    return found


def peers():
    """Other methods that find a learning rate, with their defaults."""
    from dadaptation import DAdaptAdam
    from prodigyopt import Prodigy
    from schedulefree import AdamWScheduleFree

    def schedule_free(params):
        optimizer = AdamWScheduleFree(params, lr=1.0)
        optimizer.train()
        return optimizer

    return {
        "Prodigy": lambda params: Prodigy(params, lr=1.0),
        "Prodigy, slice_p=11": lambda params: Prodigy(params, lr=1.0, slice_p=11),
        "D-Adaptation": lambda params: DAdaptAdam(params, lr=1.0),
        "Schedule-Free": schedule_free,
    }


def measured_bytes(dtype, build):
    """Per parameter, of 24 matrices with a bias each (6.3 million), without parameters and gradients."""
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in [(512, 512), (512,)] * 24]
    optimizer = build(params)
    for p in params:
        p.grad = torch.ones_like(p)
    elements = sum(p.numel() for p in params)
    kept, _ = allocations(lambda: [optimizer.step() for _ in range(3)])
    _, most = allocations(optimizer.step)
    return kept / elements, most / 1e6


def print_bytes(dtypes):
    torch.compiler.set_stance("force_eager")
    by_name = {"AdamW": fused_adamw, **low_bit_bases()}
    for dtype in (getattr(torch, name) for name in dtypes or ("float32", "bfloat16")):
        rows = {f"bare {name}": build for name, build in (by_name | peers()).items()}
        for base, build in by_name.items():
            for name, delta in STORAGES.items() if base == "AdamW" else [("int8", "int8")]:
                rows[f"{base}, Delta in {name}"] = lambda params, b=build, d=delta: Mechanic(b(params), delta=d)
        for name, build in rows.items():
            kept, most = measured_bytes(dtype, build)
            print(f"{dtype} {name:45s} kept {kept:6.3f}  temporary {most:5.1f} MB", flush=True)


def print_half(steps=400):
    """Train and test loss of digits, of which 30 % have random labels and a third is held out."""
    images, labels = noisy_digits()
    held_out = torch.arange(len(labels)) % 3 == 0
    split = {"train": (images[~held_out], labels[~held_out]), "test": (images[held_out], labels[held_out])}
    torch.compiler.set_stance("force_eager")
    adamw = functools.partial(torch.optim.AdamW, lr=1.0)
    rows = {"float32 parameters": (adamw, torch.float32, None)}
    rows |= {f"bfloat16, Delta in {name}": (adamw, torch.bfloat16, delta) for name, delta in STORAGES.items()}
    rows |= {f"bfloat16, Delta in int8, {n}": (build, torch.bfloat16, "int8") for n, build in low_bit_bases().items()}
    stochastically = "bfloat16, Delta in int8, parameters rounded stochastically"
    rows[stochastically] = rows["bfloat16, Delta in int8"]
    residual = lists.round_into
    for name, (build, dtype, delta) in rows.items():
        lists.round_into = round_stochastically if name == stochastically else residual
        losses = {part: [] for part in split}
        for seed in SEEDS:
            model = mlp(hidden=64, dtype=dtype, seed=seed)
            optimizer = Mechanic(build(model.parameters()), delta=delta)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            generator = torch.Generator().manual_seed(seed)
            for _ in range(steps):
                chosen = torch.randint(len(split["train"][1]), (64,), generator=generator)
                optimizer.zero_grad()
                half_loss(model, *(tensor[chosen] for tensor in split["train"])).backward()
                optimizer.step()
                schedule.step()
            with torch.no_grad():
                for part, data in split.items():
                    losses[part].append(half_loss(model.float(), *data).item())
        each = "  ".join(f"{part} {' '.join(f'{loss:.4f}' for loss in found)}" for part, found in losses.items())
        print(f"{name:45s} {each}", flush=True)


def round_stochastically(rounded, residuals, values):
    """In place of :func:`mechanic.torch.lists.round_into`: the residuals stay 0."""
    for value, p in zip(values, rounded, strict=True):
        bits = value.view(torch.int32) + torch.randint(1 << 16, value.shape, dtype=torch.int32, generator=RANDOM)
        p.copy_(bits.bitwise_and_(-(1 << 16)).view(torch.float32))


def print_state(steps=500):
    """Train loss with the base's state in float32 and in bfloat16: the noisy digits in bfloat16, Delta in int8."""
    for name in ("SGD momentum", "AdamW", "Adam", "NAdam", "Adamax", "Adagrad"):
        losses = {}
        for dtype, known in ((torch.float32, set()), (torch.bfloat16, {BY_NAME[name].cls})):
            bases._TAKES_BFLOAT16 = known
            losses[dtype] = []
            for seed in SEEDS[:2]:
                model = mlp(hidden=16, dtype=torch.bfloat16)
                optimizer = Mechanic(BY_NAME[name].make(model.parameters()), delta="int8")
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
                for step in range(steps):
                    optimizer.zero_grad()
                    half_loss(model, *digits_batch(step + 10_000 * seed)).backward()
                    optimizer.step()
                    schedule.step()
                with torch.no_grad():
                    losses[dtype].append(half_loss(model.float(), *noisy_digits()).item())
            kept = [v for state in optimizer.state.values() for k, v in state.items() if "mechanic" not in k and v.ndim]
            assert {value.dtype for value in kept} == {dtype}
        each = "  ".join(f"{dtype} {' '.join(f'{loss:.4f}' for loss in found)}" for dtype, found in losses.items())
        print(f"{name:20s} {each}", flush=True)


def half_loss(model, images, labels):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images)
    return torch.nn.functional.cross_entropy(logits.float(), labels)


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


def final_loss(task, build, seed):
    """The mean of the last three evaluations, and the loss at the start."""
    due = {round(share * task.steps) for share in (0.0, *EVALUATED_AT[-3:])}
    losses = [evaluate(task, model)["train_loss"] for step, model, _ in Training(task, build, seed) if step in due]
    return statistics.mean(losses[1:]), losses[0]


def print_gaps(names, ways):
    """Final losses of tasks of the suite, and the gap to the best learning rate; ``ways`` wrap a base optimizer."""
    records = RecordBook(RECORDS).records
    for name in names:
        task = TASKS[name]
        for base in ("adamw", "sgd"):
            make = functools.partial(base_class(base, task), lr=1.0)
            rows = {way: [] for way in ways}
            for seed in SEEDS:
                swept = [r for run, r in records.items() if (run.task, run.contender, run.seed) == (name, base, seed)]
                tuned = min(final(record) for record in swept)
                for way, wrap in ways.items():
                    build = functools.partial(_wrapped_of, make=make, wrap=wrap)
                    loss, start = final_loss(task, build, seed)
                    rows[way].append((loss, 100 * (loss - tuned) / (start - tuned)))
            for way, found in rows.items():
                losses = " ".join(f"{loss:.4f}" for loss, _ in found)
                gaps = " ".join(f"{gap:5.2f}" for _, gap in found)
                mean = statistics.mean(gap for _, gap in found)
                print(f"{name} {base} {way:13s} loss {losses}  gap in % {gaps}  mean {mean:5.2f}", flush=True)


def print_tasks(names):
    """Final train losses with bfloat16 parameters, activations and gradients."""
    for name in names or ("gpt-shakespeare", "bert-mlm", "vit-cifar10"):
        for base in ("adamw", "sgd"):
            # torch 2.13's fused SGD leaves bfloat16 parameters on a CPU where they are.
            options = {"fused": False} if base == "sgd" else {}
            make = functools.partial(base_class(base, TASKS[name]), lr=1.0, **options)
            for storage in ("float32", "bfloat16"):
                wrap = functools.partial(Mechanic, delta=STORAGES[storage])
                build = functools.partial(_in_bfloat16, make=make, wrap=wrap)
                losses = [final_loss(TASKS[name], build, seed)[0] for seed in SEEDS]
                each = " ".join(f"{loss:.4f}" for loss in losses)
                print(f"{name} {base} Delta in {storage:9s} {each}  mean {statistics.mean(losses):.4f}", flush=True)


def _in_bfloat16(model, make, wrap):
    model.bfloat16()
    model.register_forward_pre_hook(
        lambda _, inputs: tuple(x.bfloat16() if torch.is_floating_point(x) else x for x in inputs)
    )
    model.register_forward_hook(lambda _, inputs, outputs: outputs.float())
    return wrap(make(model.parameters()))


def _wrapped_of(model, make, wrap):
    return wrap(make(model.parameters()))


def print_losses(names):
    print_gaps(names or RUNS, {name: functools.partial(Mechanic, delta=delta) for name, delta in STORAGES.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, *names = sys.argv[1:]
    if command in ("bytes", "losses", "tasks"):
        {"bytes": print_bytes, "losses": print_losses, "tasks": print_tasks}[command](names)
    else:
        {"state": print_state, "half": print_half, "time": print_time, "digits": print_digits}[command]()
