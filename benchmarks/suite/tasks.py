"""The tasks that are trained. Those here are classifications; ``benchmarks.suite.wider`` has other kinds.

``cpu`` tasks take at most half a minute on one core.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.data import datasets, synthetic
from benchmarks.data.datasets import Split
from benchmarks.suite import models, schedules
from benchmarks.suite.loop import train_plainly
from benchmarks.suite.lora import adapt
from benchmarks.suite.losses import scaled
from benchmarks.suite.schedules import cosine, steps_down, warm_up_cosine, warm_up_linear
from benchmarks.suite.task import Task, masked, next_token, translation
from benchmarks.suite.wider import NEW_KINDS


def _convex(name: str, features: int, classes: int, lowest: float = -1.0, suffix: str = "") -> Task:
    return Task(
        name=f"convex-{name}{suffix}",
        data=functools.partial(datasets.rows, name, lowest),
        model=functools.partial(models.logistic_regression, features, classes),
        steps=1000,
        batch=64,
        schedule=steps_down(0.6, 0.8, 0.95, factor=0.1),  # as D-Adaptation's suite
        weight_decay=0.0,
        l2=0.0,
        evaluated=5000,
        seconds=1.0,
    )


CONVEX = [
    _convex("dna", 180, 3, lowest=0.0),  # zeros stay zeros
    _convex("glass", 9, 6),
    _convex("iris", 4, 3),
    _convex("letter", 16, 26),
    _convex("pendigits", 16, 10),
    _convex("sensorless", 48, 11),
    _convex("usps", 256, 10),
    _convex("vehicle", 18, 4),
    _convex("vowel", 10, 11),
    _convex("wine", 13, 3),
    _convex("satimage", 36, 6),  # stands in for smallNORB
    _convex("cifar100_histograms", 128, 100, lowest=0.0),  # stands in for aloi
]

_step_decay = steps_down(0.3, 0.6, 0.8, factor=0.2)

IMAGES = [
    Task(
        name=f"resnet-{name}",
        data=functools.partial(datasets.images, name),
        model=functools.partial(models.resnet, classes, width=8, blocks=(1, 1, 1), stride=2),
        steps=300,
        batch=32,
        schedule=_step_decay,
        evaluated=500,
        seconds=6.0,
    )
    for name, classes in (("cifar10", 10), ("cifar100", 100))
]
IMAGES += [
    Task(
        name="cnn-mnist",
        data=functools.partial(datasets.images, "mnist"),
        model=functools.partial(models.cnn, 10),
        steps=500,
        batch=64,
        schedule=cosine,
        seconds=4.0,
    ),
    Task(
        name="mlp-fashion",
        data=functools.partial(datasets.images, "fashion_mnist"),
        model=functools.partial(models.mlp, 784, 10, width=128),
        steps=1000,
        batch=64,
        schedule=cosine,
        seconds=3.0,
    ),
]

LENGTH = 32  # characters, and pieces of words
SENTENCE = 16  # pieces of words

MLM = Task(
    name="bert-mlm",
    data=functools.partial(datasets.prose, LENGTH),
    model=models.masked_bert,
    steps=300,
    batch=16,
    schedule=warm_up_linear,
    prepare=masked,
    evaluated=256,
    seconds=6.0,
)

GPT = Task(
    name="gpt-shakespeare",
    data=functools.partial(datasets.characters, LENGTH),
    model=functools.partial(models.GPT, 65, LENGTH, width=64, layers=2, heads=4, dropout=0.0),
    steps=500,
    batch=16,
    schedule=warm_up_cosine,
    prepare=next_token,
    evaluated=256,
    seconds=6.0,
)

TRANSLATION = Task(
    name="lstm-tatoeba",
    data=functools.partial(datasets.translations, SENTENCE),
    model=functools.partial(models.LSTMTranslator, datasets.VOCABULARY, width=64),
    steps=300,
    batch=32,
    schedule=warm_up_cosine,
    prepare=translation,
    evaluated=256,
    seconds=6.0,
)

TABULAR = Task(
    name="mlp-adult",
    data=datasets.adult,
    model=functools.partial(models.mlp, 108, 2, width=64),
    steps=1000,
    batch=64,
    schedule=cosine,
    seconds=3.0,
)


# Fine-tuning: what is fine-tuned is trained here once, and kept.


def _pretrained(task: Task, lr: float) -> dict[str, Tensor]:
    """The weights after training a task with AdamW at this learning rate."""

    def make() -> dict[str, Tensor]:
        return train_plainly(task, functools.partial(torch.optim.AdamW, lr=lr, weight_decay=0.01), seed=0).state_dict()

    return datasets.cached(f"weights-{task.name}-{task.steps}-steps", make)


def _continue(model: nn.Module, weights: dict[str, Tensor], body: str) -> nn.Module:
    """Load the weights of the body; the former head's are left."""
    kept = {name: tensor for name, tensor in weights.items() if f"{body}." in name}
    missing, unexpected = model.load_state_dict(kept, strict=False)
    assert not unexpected, unexpected
    assert all("classifier" in name for name in missing), missing
    return model


def _tuned_bert(classes: int, dropout: float) -> nn.Module:
    weights = _pretrained(replace(MLM, steps=3000), lr=2e-3)
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    return _continue(models.ClassifyingBert(classes, dropout), weights, body="bert")


def _fine_tuning(name: str, classes: int, dropout: float) -> Task:
    return Task(
        name=f"bert-{name}" + (f"-dropout{dropout}" if dropout else ""),
        data=functools.partial(datasets.intents, name, 24),
        model=functools.partial(_tuned_bert, classes, dropout),
        steps=300,
        batch=32,
        schedule=warm_up_linear,
        weight_decay=0.0,
        l2=0.0,
        evaluated=500,
        seconds=5.0,
    )


def _tuned_vit() -> nn.Module:
    pretraining = Task(
        name="vit-cifar100",
        data=functools.partial(datasets.images, "cifar100"),
        model=functools.partial(models.vit, 100),
        steps=3000,
        batch=64,
        schedule=warm_up_cosine,
    )
    return _continue(models.vit(10), _pretrained(pretraining, lr=1e-3), body="vit")


FINE_TUNING = [
    *(_fine_tuning(name, k, rate) for name, k in (("banking77", 77), ("clinc150", 150)) for rate in (0.0, 0.1)),
    Task(
        name="vit-cifar10",
        data=functools.partial(datasets.images, "cifar10"),
        model=_tuned_vit,
        steps=300,
        batch=32,
        schedule=warm_up_cosine,
        weight_decay=0.0,
        l2=0.0,
        evaluated=500,
        seconds=6.0,
    ),
]

LANGUAGE = [GPT, MLM, TRANSLATION]

# The paper's figure: the learned scale over batch sizes and model sizes, for a masked language model.
BATCHES = [replace(MLM, name=f"bert-mlm-batch{batch}", batch=batch) for batch in (4, 8, 16, 32)]


def _of_width(width: int) -> Task:
    model = functools.partial(models.masked_bert, width=width)
    return replace(MLM, name=f"bert-mlm-width{width}", model=model)


WIDTHS = [_of_width(width) for width in (16, 32, 64, 128)]


def _gpt_of(width: int, layers: int) -> Task:
    model = functools.partial(models.GPT, 65, LENGTH, width=width, layers=layers, heads=4, dropout=0.0)
    seconds = GPT.seconds * layers / 2 * max(1.0, width / 64)
    return replace(GPT, name=f"{GPT.name}-width{width}-layers{layers}", model=model, seconds=seconds)


GPT_WIDTHS = [_gpt_of(width, layers) for layers, widths in ((2, (32, 64, 128, 256)), (4, (32, 64))) for width in widths]
MUON_WIDTHS = [*GPT_WIDTHS, *WIDTHS[1:], _of_width(256)]

# Scaled so that an empty bin is -1, the noise of the classes in a batch drowns all else: no tuner gets off the ground.
HARD = [_convex("cifar100_histograms", 128, 100, suffix="-centred")]

# Little data, learned by heart, and dropout: what is tuned for matters there.


def _some(of: Task, count: int, steps: int) -> Task:
    def few() -> Split:
        split = of.data()
        # Any rows, not the first: some of the data are in the order of their classes.
        chosen = torch.randperm(len(split.train[0]), generator=torch.Generator().manual_seed(0))[:count]
        return Split(tuple(tensor[chosen] for tensor in split.train), split.test)

    ends = (*of.ends, "train_accuracy")
    return replace(of, name=f"{of.name}-{count}", data=functools.cache(few), steps=steps, ends=ends)


_by_name = {task.name: task for task in [*IMAGES, *FINE_TUNING]}
FEW = [
    _some(_by_name["mlp-fashion"], 2000, steps=2000),
    _some(_by_name["cnn-mnist"], 500, steps=1000),
    _some(_by_name["resnet-cifar10"], 1000, steps=600),
    _some(_by_name["bert-banking77"], 2000, steps=800),
]


def _gpt(dropout: float) -> Task:
    model = functools.partial(models.GPT, 65, LENGTH, width=64, layers=2, heads=4, dropout=dropout)
    return replace(GPT, name=f"{GPT.name}-dropout{dropout}", model=model)


DROPOUT = [*(_gpt(rate) for rate in (0.1, 0.3, 0.5)), *(_fine_tuning("banking77", 77, rate) for rate in (0.3, 0.5))]
LONG = [replace(task, name=f"{task.name}-long", steps=2000) for task in (_by_name["mlp-fashion"], GPT)]

# The wider suite, where it is a task above with something changed.


def _low_rank_bert() -> nn.Module:
    """The head starts anew and is trained whole."""
    model = _tuned_bert(77, dropout=0.0)
    model.bert = adapt(model.bert, rank=8)
    return model


def _low_rank_gpt() -> nn.Module:
    model = GPT.model()
    model.load_state_dict(_pretrained(replace(GPT, steps=3000), lr=2e-3))
    return adapt(model, rank=8)


def _changed(of: Task, how: str, **changes: object) -> Task:
    return replace(of, name=f"{of.name}-{how}", **changes)


def _mlp(name: str, features: int, classes: int, batch: int, steps: int) -> Task:
    data, model = functools.partial(datasets.rows, name), functools.partial(models.mlp, features, classes, width=64)
    return Task(f"mlp-{name}", data, model, steps, batch, schedule=cosine, evaluated=2000, seconds=2.0)


_images = {name: functools.partial(datasets.images, name) for name in ("mnist", "fashion_mnist")}
_letter, _usps = _mlp("letter", 16, 26, batch=64, steps=1000), _mlp("usps", 256, 10, batch=64, steps=600)
CHANGED = [
    replace(_fine_tuning("banking77", 77, 0.0), name="lora-banking77", model=_low_rank_bert, seconds=7.0),
    replace(
        GPT,
        name="lora-gutenberg",
        data=functools.partial(datasets.novels, LENGTH),
        model=_low_rank_gpt,
        steps=300,
        weight_decay=0.0,
        l2=0.0,
    ),
    replace(
        _by_name["mlp-fashion"],
        name="imbalanced-fashion",
        data=functools.partial(synthetic.long_tail, _images["fashion_mnist"], 100),
    ),
    replace(_letter, name="imbalanced-letter", data=functools.partial(synthetic.long_tail, _letter.data, 100)),
    replace(
        _by_name["cnn-mnist"],
        name="noisy-labels-mnist",
        data=functools.partial(synthetic.false_labels, _images["mnist"], 0.4),
    ),
    replace(_usps, name="noisy-labels-usps", data=functools.partial(synthetic.false_labels, _usps.data, 0.2)),
    _changed(TABULAR, "loss1e-6", loss=scaled(1e-6), l2=0.0),  # any l2 would be most of so small a gradient
    _changed(GPT, "loss1e6", loss=scaled(1e6)),
    _changed(_mlp("pendigits", 16, 10, batch=1, steps=2000), "batch1"),
    _changed(_mlp("satimage", 36, 6, batch=10_000, steps=300), "full-batch"),  # a batch is never more than there is
    _changed(_by_name["mlp-fashion"], "constant", schedule=schedules.constant),
    _changed(GPT, "constant", schedule=schedules.constant),
    _changed(GPT, "wsd", schedule=schedules.warm_up_stable_decay),
    _changed(_by_name["cnn-mnist"], "wsd", schedule=schedules.warm_up_stable_decay),
    _changed(_by_name["cnn-mnist"], "onecycle", schedule=schedules.one_cycle),
    _changed(_by_name["resnet-cifar10"], "onecycle", schedule=schedules.one_cycle),
]

CPU = [*CONVEX, TABULAR, *IMAGES, *LANGUAGE, *FINE_TUNING]
WIDER = [*NEW_KINDS, *CHANGED]


def _times(of: Task, factor: int) -> Task:
    return of if factor == 1 else _changed(of, f"{factor}x", steps=factor * of.steps, seconds=factor * of.seconds)


_of_horizons = ("mlp-fashion", "cnn-mnist", "gpt-shakespeare", "mlp-adult", "set-mnist", "noisy-regression")
HORIZONS = {  # the same task over 1, 4 and 16 times its steps
    task.name: {factor: _times(task, factor) for factor in (1, 4, 16)}
    for task in [*CPU, *WIDER]
    if task.name in _of_horizons
}
LONGER = [task for by_factor in HORIZONS.values() for task in by_factor.values()]
TASKS = {
    task.name: task for task in [*CPU, *HARD, *BATCHES, *WIDTHS, *FEW, *DROPOUT, *LONG, *WIDER, *LONGER, *MUON_WIDTHS]
}
