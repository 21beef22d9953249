"""How a recipe is trained: shards, global batches in parts, and evaluations over all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.paper.checkpoint import Checkpoint
from benchmarks.paper.data import Batches, Data
from benchmarks.paper.models import Network
from benchmarks.paper.recipes import Recipe
from benchmarks.paper.setup import Setup, Tensors
from benchmarks.suite.contenders import Contender
from benchmarks.suite.loop import names_of_parameters, renamed
from benchmarks.suite.measure import Progress
from benchmarks.suite.partial import random_state, set_random_state
from benchmarks.suite.record import EVALUATED_AT
from benchmarks.suite.schedules import at_steps
from benchmarks.suite.task import IGNORED
from mechanic.torch import Mechanic


def build(recipe: Recipe, setup: Setup, pieces: int) -> Network:
    return recipe.network(setup, pieces) if recipe.pieces else recipe.network(setup)


def shard(network: Network, mesh: DeviceMesh, bf16: bool) -> nn.Module:
    model, blocks = network
    if mesh.device_type == "cuda":  # elsewhere every rank normalises its own share
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
    options = {"mesh": mesh} | ({"mp_policy": policy} if policy else {})
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
    recipe: Recipe,
    contender: Contender,
    lr: float,
    setup: Setup,
    seed: int,
    bf16: bool,
    checkpoint: Checkpoint | None = None,
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
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = shard(build(recipe, setup, data.pieces), mesh, bf16).train()
    optimizer = contender.build(model, recipe, lr)
    for group in optimizer.param_groups:
        if contender.base == "sgd" and group.get("fused"):
            group["fused"] = None  # torch 2.13 cannot do this on shards
    torch.manual_seed(1 + seed * setup.ranks + setup.rank)  # but dropout of its own
    generator = torch.Generator(device).manual_seed(1 + seed * setup.ranks + setup.rank)
    shape = recipe.schedule if contender.follows_schedule else lambda done: 1.0
    schedule = LambdaLR(optimizer, at_steps(shape, recipe.steps))
    batches, progress, first = data.batches(seed), Progress(), 0
    run = State(model, optimizer, schedule, batches, generator, progress)
    if checkpoint is not None:
        checkpoint.origin["data"] = data.fingerprint()
        if (state := checkpoint.load(mesh)) is not None:
            run.restore(state)
            first = progress.step + 1

    due = {round(share * recipe.steps) for share in EVALUATED_AT}
    start = time.perf_counter()
    for step in range(first, recipe.steps + 1):
        if step > 0:
            optimizer.zero_grad()
            learn(model, recipe, data, next(batches), generator, device)
            optimizer.step()
            schedule.step()
        progress.step = step
        saves = checkpoint is not None and checkpoint.due(step)
        if step not in due and not saves:
            continue
        if device.type == "cuda":
            torch.cuda.synchronize()
        progress.seconds += time.perf_counter() - start
        if step in due:
            point = {"step": step, **judge(model, optimizer, data, recipe.device_batch, device)}
            progress.add(point)
            if setup.rank == 0:
                print(", ".join(f"{key} {value:.4g}" for key, value in point.items()), flush=True)
            if not math.isfinite(point["train_loss"]):
                break  # what has diverged does not come back
        if saves:
            checkpoint.save(step, run.state())
        start = time.perf_counter()
    return model, {"steps": recipe.steps, "seconds": round(progress.seconds, 3), "curve": progress.curve}


class State(NamedTuple):
    """All that the next steps hang on."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LambdaLR
    batches: Batches
    generator: torch.Generator
    progress: Progress

    def state(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule", "batches")}
        parts["optimizer"] = renamed(parts["optimizer"], names_of_parameters(self.model))
        own = {"generator": self.generator.get_state(), "random": random_state(), "progress": vars(self.progress)}
        return {**parts, **own}

    def restore(self, state: dict[str, Any]) -> None:
        names = {name: parameter for parameter, name in names_of_parameters(self.model).items()}
        state = {**state, "optimizer": renamed(state["optimizer"], names)}
        for name in ("model", "optimizer", "schedule", "batches"):
            getattr(self, name).load_state_dict(state[name])
        self.generator.set_state(state["generator"])
        set_random_state(state["random"])
        vars(self.progress).update(state["progress"])


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
