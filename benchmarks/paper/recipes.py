"""The paper's experiments as a table of recipes.

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

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.paper import data, models
from benchmarks.paper.data import GLUE, Data
from benchmarks.paper.models import Network
from benchmarks.paper.setup import BERT, PIECES, VIT, Setup
from benchmarks.suite.schedules import cosine, inverse_root, steps_down, warm_up, warm_up_linear


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


def _cifar(name: str, network: Callable[..., Network], dataset: str, classes: int) -> Recipe:
    return Recipe(
        name,
        functools.partial(network, classes=classes),
        functools.partial(data.cifar, name=dataset),
        contender="mechanic sgd",
        batch=128,
        epochs=200,
        schedule=steps_down(0.3, 0.6, 0.8, factor=0.2),  # 60, 120 and 160 epochs
        clip=1.0,
        l2=0.0005,
        augment=data.shift_and_flip,
        bf16=False,
        sweep={"sgd": (0.3, 0.1, 0.03)},
    )


def _bert(size: str, best: dict[str, float], device_batch: int) -> Recipe:
    return Recipe(
        f"bert-{size}-mlm",
        functools.partial(models.masked_bert, size=size),
        functools.partial(data.masked_text, length=512),
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
        functools.partial(models.classifying_bert, classes=GLUE[name][1]),
        functools.partial(data.glue, name=name, length=128),
        contender="mechanic adamw",
        batch=32,
        epochs=10,
        schedule=warm_up_linear,
        clip=1.0,
        our_dropout=0.0,
        evaluated=50_000,  # all of a development set
        start=BERT,
        pieces=PIECES["bert"],
        sweep={"adamw": (5e-5, 1e-4, 2e-4, 3e-4, 5e-4), "lion": (5e-6, 1e-5, 2e-5, 3e-5, 5e-5)},
    )


def _vit(dataset: str, classes: int) -> Recipe:
    return Recipe(
        f"vit-finetune-{dataset}",
        functools.partial(models.vit, classes=classes),
        functools.partial(data.cifar, name=dataset, centred=True),
        contender="mechanic sgd",
        batch=512,
        steps=10_000,
        schedule=warm_up(0.05, cosine),
        clip=1.0,
        augment=data.zoom_and_flip,
        start=VIT,
        device_batch=64,
        sweep={"sgd": (0.001, 0.003, 0.01, 0.03)},
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        _cifar("resnet18-cifar10", models.resnet18, "cifar10", 10),
        _cifar("resnet18-cifar100", models.resnet18, "cifar100", 100),
        _cifar("wrn40-10-cifar100", models.wide_resnet, "cifar100", 100),
        _bert("base", {"adamw": 5e-3, "lion": 5e-4}, device_batch=32),
        _bert("large", {"adamw": 1e-3, "lion": 2e-4}, device_batch=16),
        *map(_glue, GLUE),
        Recipe(
            "gpt-bookwiki",
            functools.partial(models.gpt, length=512),
            functools.partial(data.plain_text, length=512),
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
            models.translator,
            functools.partial(data.iwslt14, length=64),
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
