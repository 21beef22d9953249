"""The paper's experiments at their real size: ``torchrun --nproc-per-node N -m benchmarks.paper RECIPE``.

Every recipe trains with FSDP2, on CUDA with nccl and bf16 (the convolutional networks in float32: their batch norms
keep statistics), else on gloo in float32. A global batch is the same on any number of ranks; ``--device-batch`` says
how much of it a device takes at once. Rank 0 appends a record like those of ``benchmarks.training``, of the task
"paper-RECIPE"; a trial with ``--steps`` or ``--small`` is a task of another name, so that it stands in nobody's way.

``--small`` runs the same code with a shrunken network on a slice of the local data (``MECHANIC_DATA``), without
network: that is what the tests do, on the CPU. They cannot tell whether the datasets, tokenizers and checkpoints on the
Hub (``transformers`` and ``datasets`` must be installed for them) still have the names and columns used here, nor how
the recipes fare on CUDA.

What the paper states is in the table below as it is. Our choice, where it states nothing:

- CIFAR: padding of 4 for the crop. Of the weight decays it tried, 0.0005.
- BERT: 10k steps of warm-up, linear decay, length 512 from the start, dropout 0.1 and clipping at 1, as BERT's
  authors; a quarter books. Weight decay 0.1 with Lion: the table says "M-AdamW" in the row of Lion's betas.
- GLUE: a batch of 32 of the two it tried, length 128, clipping at 1. MNLI is evaluated on the matched part, CoLA, which
  is not in the paper, by accuracy.
- GPT and LSTM: the paper took D-Adaptation's settings. Ours are after what we know of those, which we could not
  check: fairseq's architectures "transformer_lm_gpt" and "lstm_wiseman_iwslt_de_en", steps, weight decay, dropout,
  label smoothing and the LSTM's schedule. Batch and schedule of the GPT are our own, and a batch of 160 pairs in place
  of 4096 tokens. Adam's second beta is 0.999 as elsewhere here.
- ViT: crops like those of its authors' code, as far as we know it. The paper's weights, from JFT-300M, are not public:
  ImageNet-21k's stand in for them, and pre-training on JFT-300M has no recipe.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks import paper_data, paper_models
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.paper_data import GLUE, Data
from benchmarks.paper_models import PIECES, Network, Setup, Tensors
from benchmarks.recordbook import RECORDS, RecordBook
from benchmarks.tasks import IGNORED, cosine, steps_down, warm_up_linear
from benchmarks.training import EVALUATED_AT, Run, versions
from mechanic.torch import Mechanic


def warm_up(share: float, then: Callable[[float], float]) -> Callable[[float], float]:
    return lambda done: done / share if done < share else then((done - share) / (1 - share))


def inverse_root(share: float) -> Callable[[float], float]:
    return lambda done: done / share if done < share else (share / done) ** 0.5


@dataclass(frozen=True)
class Recipe:
    """One experiment; contenders read ``steps``, ``schedule``, ``weight_decay`` and ``l2`` as they do from a Task."""

    name: str
    network: Callable[..., Network]  # setup, and pieces of the vocabulary where there are any
    data: Callable[[Setup], Data]
    contender: str  # unless another is asked for
    batch: int  # of all ranks together
    schedule: Callable[[float], float]
    steps: int = 0
    epochs: int = 0  # in place of steps
    clip: float | None = None
    weight_decay: float = 0.0
    lion_weight_decay: float = 0.0
    l2: float = 0.0
    dropout: float = 0.1
    our_dropout: float = 0.1  # the paper's with Mechanic
    smoothing: float = 0.0  # of labels
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    start: str | None = None  # what is fine-tuned
    pieces: int = 0
    bf16: bool = True
    device_batch: int = 128  # ours: about what 80 GB hold
    evaluated: int = 10_000
    sweep: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # learning rates of the paper's baselines


def _cifar(name: str, network: Callable[..., Network], data: str, classes: int) -> Recipe:
    return Recipe(
        name,
        functools.partial(network, classes=classes),
        functools.partial(paper_data.cifar, name=data),
        contender="mechanic sgd",
        batch=128,
        epochs=200,
        schedule=steps_down(0.3, 0.6, 0.8, factor=0.2),  # 60, 120 and 160 epochs
        clip=1.0,
        l2=0.0005,
        augment=paper_data.shift_and_flip,
        bf16=False,
        sweep={"sgd": (0.3, 0.1, 0.03)},
    )


def _bert(size: str, best: dict[str, float], device_batch: int) -> Recipe:
    return Recipe(
        f"bert-{size}-mlm",
        functools.partial(paper_models.masked_bert, size=size),
        functools.partial(paper_data.masked_text, length=512),
        contender="mechanic adamw",
        batch=2048,
        steps=150_000,
        schedule=warm_up(1 / 15, lambda done: 1 - done),
        clip=1.0,
        weight_decay=0.01,
        lion_weight_decay=0.1,
        pieces=PIECES["bert"],
        device_batch=device_batch,
        evaluated=2048,
        sweep={base: (lr,) for base, lr in best.items()},
    )


def _glue(name: str) -> Recipe:
    return Recipe(
        f"glue-{name}",
        functools.partial(paper_models.classifying_bert, classes=GLUE[name][1]),
        functools.partial(paper_data.glue, name=name, length=128),
        contender="mechanic adamw",
        batch=32,
        epochs=10,
        schedule=warm_up_linear,
        clip=1.0,
        our_dropout=0.0,
        evaluated=50_000,  # all of a development set
        start=paper_models.BERT,
        pieces=PIECES["bert"],
        sweep={"adamw": (5e-5, 1e-4, 2e-4, 3e-4, 5e-4), "lion": (5e-6, 1e-5, 2e-5, 3e-5, 5e-5)},
    )


def _vit(data: str, classes: int) -> Recipe:
    return Recipe(
        f"vit-finetune-{data}",
        functools.partial(paper_models.vit, classes=classes),
        functools.partial(paper_data.cifar, name=data, centred=True),
        contender="mechanic sgd",
        batch=512,
        steps=10_000,
        schedule=warm_up(0.05, cosine),
        clip=1.0,
        augment=paper_data.zoom_and_flip,
        start=paper_models.VIT,
        device_batch=64,
        sweep={"sgd": (0.001, 0.003, 0.01, 0.03)},
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        _cifar("resnet18-cifar10", paper_models.resnet18, "cifar10", 10),
        _cifar("resnet18-cifar100", paper_models.resnet18, "cifar100", 100),
        _cifar("wrn40-10-cifar100", paper_models.wide_resnet, "cifar100", 100),
        _bert("base", {"adamw": 5e-3, "lion": 5e-4}, device_batch=32),
        _bert("large", {"adamw": 1e-3, "lion": 2e-4}, device_batch=16),
        *map(_glue, GLUE),
        Recipe(
            "gpt-bookwiki",
            functools.partial(paper_models.gpt, length=512),
            functools.partial(paper_data.plain_text, length=512),
            contender="mechanic adamw",
            batch=256,
            steps=65_000,
            schedule=warm_up(0.1, lambda done: 1 - done),
            weight_decay=0.005,
            lion_weight_decay=0.005,
            pieces=PIECES["gpt"],
            device_batch=16,
            evaluated=2048,
        ),
        Recipe(
            "lstm-iwslt14",
            paper_models.translator,
            functools.partial(paper_data.iwslt14, length=64),
            contender="mechanic adamw",
            batch=160,
            epochs=55,
            schedule=inverse_root(4 / 55),
            weight_decay=0.05,
            lion_weight_decay=0.05,
            dropout=0.3,
            our_dropout=0.3,
            smoothing=0.1,
            pieces=PIECES["iwslt14"],
            device_batch=160,
        ),
        _vit("cifar10", 10),
        _vit("cifar100", 100),
    )
}


def build(recipe: Recipe, setup: Setup, pieces: int) -> Network:
    return recipe.network(setup, pieces) if recipe.pieces else recipe.network(setup)


def shard(network: Network, device: torch.device, bf16: bool) -> nn.Module:
    model, blocks = network
    if device.type == "cuda":  # elsewhere every rank normalises its own share
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
    options = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    options |= {"mp_policy": policy} if policy else {}
    for module in (*blocks, model):
        fully_shard(module, **options)
    return model


def parts_of(batch: Tensors, size: int, device: torch.device) -> Iterator[Tensors]:
    for part in zip(*(tensor.split(size) for tensor in batch), strict=True):
        yield tuple(tensor.to(device, non_blocking=True) for tensor in part)


def logits_and_targets(model: nn.Module, inputs: Tensors, targets: Tensor) -> tuple[Tensor, Tensor]:
    return model(*inputs).float().flatten(0, -2), targets.flatten()


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, size: int, device: torch.device) -> dict[str, float]:
    """Loss and accuracy over what all ranks hold out, masked the same way every time."""
    for name, buffer in model.named_buffers():
        if "running" in name:  # ranks that normalise their own shares have statistics of their own
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
    model.eval()
    found = {}
    for part, held_out in data.held_out.items():
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # losses, right answers, all answers
        for batch in parts_of(held_out, size, device):
            logits, targets = logits_and_targets(model, *data.prepare(batch, generator))
            loss = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
            sums += torch.stack([loss, (logits.argmax(-1) == targets).sum(), (targets != IGNORED).sum()])
        dist.all_reduce(sums)
        loss, right, count = sums.tolist()
        found |= {f"{part}_loss": loss / count, f"{part}_accuracy": right / count}
    model.train()
    return found


def learn(
    model: nn.Module, recipe: Recipe, data: Data, batch: Tensors, generator: torch.Generator, device: torch.device
) -> None:
    """Gradients of the mean over all targets of the global batch, whichever rank or part has them."""
    parts = []
    for part in parts_of(batch, recipe.device_batch, device):
        augmented = (recipe.augment(part[0], generator), *part[1:]) if recipe.augment else part
        parts.append(data.prepare(augmented, generator))
    count = sum((targets != IGNORED).sum() for _, targets in parts)
    dist.all_reduce(count)
    for index, (inputs, targets) in enumerate(parts):
        model.set_requires_gradient_sync(index == len(parts) - 1)
        logits, targets = logits_and_targets(model, inputs, targets)
        options = {"ignore_index": IGNORED, "reduction": "sum", "label_smoothing": recipe.smoothing}
        loss = nn.functional.cross_entropy(logits, targets, **options)
        (loss * dist.get_world_size() / count).backward()  # FSDP averages over the ranks
    if recipe.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)


def train(
    recipe: Recipe, contender: Contender, lr: float, setup: Setup, seed: int, bf16: bool
) -> tuple[nn.Module, dict[str, Any]]:
    """The trained model, and what a record has of the training."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    data = recipe.data(setup)
    recipe = replace(
        recipe,
        steps=recipe.steps or recipe.epochs * (data.samples // recipe.batch),
        weight_decay=recipe.lion_weight_decay if contender.base == "lion" else recipe.weight_decay,
    )
    torch.manual_seed(seed)  # the same weights on all ranks: each keeps its shard
    model = shard(build(recipe, setup, data.pieces), device, bf16).train()
    optimizer = contender.build(model, recipe, lr)
    for group in optimizer.param_groups:
        if contender.base == "sgd" and group.get("fused"):
            group["fused"] = None  # torch 2.13 cannot do this on shards
    torch.manual_seed(1 + seed * setup.ranks + setup.rank)  # but dropout of its own
    generator = torch.Generator(device).manual_seed(1 + seed * setup.ranks + setup.rank)
    shape = recipe.schedule if contender.follows_schedule else lambda done: 1.0
    # The first step of a warm-up is not taken at 0.
    schedule = LambdaLR(optimizer, lambda step: shape((step + (shape(0.0) == 0.0)) / recipe.steps))

    due = {round(share * recipe.steps) for share in EVALUATED_AT}
    curve: dict[str, list[float | None]] = {}
    seconds, start = 0.0, time.perf_counter()
    batches = data.batches(seed)
    for step in range(recipe.steps + 1):
        if step > 0:
            optimizer.zero_grad()
            learn(model, recipe, data, next(batches), generator, device)
            optimizer.step()
            schedule.step()
        if step not in due:
            continue
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        point = {"step": step, **judge(model, optimizer, data, recipe.device_batch, device)}
        for key, value in point.items():
            curve.setdefault(key, []).append(float(f"{value:.5g}") if math.isfinite(value) else None)
        if setup.rank == 0:
            print(", ".join(f"{key} {value:.4g}" for key, value in point.items()), flush=True)
        if not math.isfinite(point["train_loss"]):
            break  # what has diverged does not come back
        start = time.perf_counter()
    return model, {"steps": recipe.steps, "seconds": round(seconds, 3), "curve": curve}


def judge(model: nn.Module, optimizer: Optimizer, data: Data, size: int, device: torch.device) -> dict[str, float]:
    moves = hasattr(optimizer, "eval")  # Schedule-Free
    if moves:
        optimizer.eval()
    found = evaluate(model, data, size, device)
    if moves:
        optimizer.train()
    return found | ({"scale": optimizer.scales()["default"]} if isinstance(optimizer, Mechanic) else {})


def save(model: nn.Module, folder: Path) -> None:
    """The whole weights, where ``--from`` finds them."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    inner = getattr(model, "model", None)
    if hasattr(inner, "save_pretrained"):
        inner.save_pretrained(folder, state_dict={name.removeprefix("model."): w for name, w in weights.items()})
    else:
        torch.save(weights, folder / "weights.pt")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    first, rest = (__doc__ or "").split("\n", 1)
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.paper", description=first, epilog=rest, formatter_class=formatter)
    parser.add_argument("recipe", choices=RECIPES, metavar="RECIPE", help=", ".join(RECIPES))
    parser.add_argument("--contender", choices=CONTENDERS, metavar="NAME", help="by its name in benchmarks.contenders")
    parser.add_argument("--lr", type=float, help="without it the contender's own, 1 for Mechanic")
    parser.add_argument("--steps", type=int, help="to which the schedule is shrunk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device-batch", type=int, help="samples a device takes at once")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="else float32; by default as said above")
    parser.add_argument("--from", dest="start", metavar="CHECKPOINT", help="to fine-tune: a folder or name on the Hub")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="for the trained weights")
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="FOLDER")
    parser.add_argument("--small", action="store_true", help="a trial on local data")
    arguments = parser.parse_args(words)

    recipe = RECIPES[arguments.recipe]
    arguments.contender = contender = CONTENDERS[arguments.contender or recipe.contender]
    arguments.lr = contender.lr if arguments.lr is None else arguments.lr
    if arguments.lr is None:
        tried = ", ".join(map(str, recipe.sweep.get(contender.base, ()))) or "none"
        parser.error(f"{contender.name} is to be tuned: pass --lr; the paper's for {recipe.name}: {tried}")
    if contender.averages:
        parser.error(f"{contender.name} is evaluated at an average of whole weights, which nobody has under FSDP2")
    if arguments.start and not recipe.start:
        parser.error(f"--from: {recipe.name} is trained from scratch; only the GLUE and ViT recipes are fine-tuned")
    if arguments.bf16 and not recipe.bf16:
        parser.error(f"--bf16: the batch norms of {recipe.name} need float32")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run on a process group that is there; its record, which rank 0 has written."""
    recipe, contender = RECIPES[arguments.recipe], arguments.contender
    task = f"paper-{recipe.name}" + "-small" * arguments.small
    task += f"-{arguments.steps}-steps" if arguments.steps else ""
    this = Run(task, contender.name, arguments.lr, arguments.seed)
    if paper_data.agreed(lambda: this in RecordBook(arguments.records).records):
        raise ValueError(f"{this} is recorded in {arguments.records}: pass another --seed, or another --records")
    start = arguments.start
    if arguments.small:
        recipe = replace(recipe, batch=8, device_batch=2, steps=20, epochs=0, evaluated=8)
    else:
        start = start or recipe.start
    recipe = replace(
        recipe, steps=arguments.steps or recipe.steps, device_batch=arguments.device_batch or recipe.device_batch
    )
    ranks = dist.get_world_size()
    if recipe.batch % ranks:
        raise ValueError(f"{recipe.name}: a batch of {recipe.batch} cannot be shared evenly by {ranks} ranks")
    ours = contender.name.startswith(("mechanic", "flat"))
    setup = Setup(
        small=arguments.small,
        start=start,
        dropout=recipe.our_dropout if ours else recipe.dropout,
        batch=recipe.batch,
        evaluated=recipe.evaluated,
        rank=dist.get_rank(),
        ranks=ranks,
    )
    bf16 = arguments.bf16 if arguments.bf16 is not None else recipe.bf16 and torch.cuda.is_available()
    model, found = train(recipe, contender, arguments.lr, setup, arguments.seed, bf16)
    if arguments.save:
        save(model, arguments.save)
    record = {**vars(this), **found, "versions": versions()}
    if setup.rank == 0:
        RecordBook(arguments.records).add(record)
    return record


def main() -> None:
    arguments = parse()
    if "RANK" not in os.environ:
        raise SystemExit("one process per device: torchrun --nproc-per-node N -m benchmarks.paper RECIPE")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Rank 0 may be downloading while the others wait.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(hours=2))
    run(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
