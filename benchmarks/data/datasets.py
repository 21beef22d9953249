"""Datasets as tensors: from a local folder (``MECHANIC_DATA``) where one is set, else from their public sources."""

from __future__ import annotations

import csv
import functools
import io
import json
import lzma
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.data import sources

FILES = {  # where the local folder has what the public sources call by these names
    **{name: f"convex/{name}.npz" for name in ("dna", "glass", "iris", "letter", "pendigits", "satimage")},
    **{name: f"convex/{name}.npz" for name in ("usps", "vehicle", "vowel", "wine")},
    "sensorless": "convex/sensorless2200.npz",
    "cifar100_histograms": "convex/cifar100_hist128.npz",
    "cifar10": "vision/cifar10_12k.npz",
    "cifar100": "vision/cifar100_12k.npz",
    "mnist": "vision/mnist.npz",
    "fashion_mnist": "vision/fashion_mnist_12k.npz",
    **{name: f"text/{name}.txt.xz" for name in ("tinyshakespeare", "wikitext2_valid")},
    "gutenberg5": "text/gutenberg5_books.txt.xz",
    "tatoeba_deu_eng": "text/tatoeba_deu_eng.tsv.xz",
    "banking77_train": "text/banking77/train.csv.xz",
    "banking77_test": "text/banking77/test.csv.xz",
    "clinc150": "text/clinc150/data_full.json.xz",
    "adult": "tabular/adult.parquet",
}
HELD_OUT = 0.2  # of the rows, where the original has no test split
IMAGES = 10_000, 2_000  # train and test, of the larger originals


class Split(NamedTuple):
    """Tensors whose first dimension counts samples: inputs, then targets."""

    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]


def _local(name: str) -> Path | None:
    folder = os.environ.get("MECHANIC_DATA")
    return Path(folder) / FILES[name] if folder else None


def text(name: str) -> str:
    path = _local(name)
    return lzma.open(path, "rt", encoding="utf-8").read() if path else sources.text(name)


def _arrays(name: str) -> dict[str, np.ndarray]:
    path = _local(name)
    if path is None:
        return _histograms(sources.arrays("cifar100")) if name == "cifar100_histograms" else sources.arrays(name)
    with np.load(path) as file:
        return {key: file[key] for key in file if key.startswith(("X_", "y_"))}


def _histograms(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """How many of an image's pixels fall into each of 8 x 4 x 4 bins of hue, saturation and value.

    The records' own histograms, of a local file, were binned with other rounding.
    """
    from matplotlib.colors import rgb_to_hsv

    def histogram(images: np.ndarray) -> np.ndarray:
        hsv = rgb_to_hsv(images / 255.0)
        bins = np.minimum((hsv * [8, 4, 4]).astype(np.int64), [7, 3, 3]) @ [16, 4, 1]  # [images, 32, 32]
        counts = np.zeros((len(images), 128), np.uint16)
        np.add.at(counts, (np.arange(len(images))[:, None, None], bins), 1)
        return counts

    return {key: histogram(value) if key.startswith("X_") else value for key, value in found.items()}


def _with_test(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if "X_test" in found:
        return found
    inputs, targets = found["X_train"], found["y_train"]
    order = np.random.default_rng(0).permutation(len(targets))
    test, train = np.split(order, [int(HELD_OUT * len(targets))])
    return {"X_train": inputs[train], "y_train": targets[train], "X_test": inputs[test], "y_test": targets[test]}


def _split(found: dict[str, np.ndarray]) -> Split:
    as_tensors = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in found.items()}
    return Split(
        (as_tensors["X_train"].float(), as_tensors["y_train"].long()),
        (as_tensors["X_test"].float(), as_tensors["y_test"].long()),
    )


@functools.cache
def rows(name: str, lowest: float = -1.0) -> Split:
    """A table of features, each scaled to [lowest, 1] over the train rows, as in LIBSVM's ``.scale`` files."""
    found = _with_test(_arrays(name))
    train = found["X_train"].astype(np.float64)
    low, high = train.min(0), train.max(0)
    width = np.where(high > low, high - low, 1.0)
    for key in ("X_train", "X_test"):
        found[key] = lowest + (1 - lowest) * (found[key] - low) / width
    return _split(found)


@functools.cache
def images(name: str) -> Split:
    """[samples, channels, height, width], standardised; a balanced part where the original is larger."""
    found = _arrays(name)
    for part, count in zip(("train", "test"), IMAGES, strict=True):
        kept = _balanced(found[f"y_{part}"], count)
        found[f"X_{part}"], found[f"y_{part}"] = found[f"X_{part}"][kept], found[f"y_{part}"][kept]
    split = _split(found)
    pixels = split.train[0]
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))

    def standardised(images: Tensor) -> Tensor:
        images = (images - mean) / std
        return images.permute(0, 3, 1, 2).contiguous() if images.dim() == 4 else images.unsqueeze(1)

    return Split((standardised(pixels), split.train[1]), (standardised(split.test[0]), split.test[1]))


def _balanced(labels: np.ndarray, count: int) -> np.ndarray:
    """Which samples to keep so that every class has equally many."""
    if len(labels) <= count:
        return np.arange(len(labels))
    shuffled = np.random.default_rng(0).permutation(len(labels))
    classes = np.unique(labels)
    each = count // len(classes)
    return np.concatenate([shuffled[labels[shuffled] == label][:each] for label in classes])


@functools.cache
def adult() -> Split:
    """Census: numbers standardised, categories one-hot."""
    import pandas as pd

    path = _local("adult")
    frame = pd.read_parquet(path) if path else sources.table("adult")
    is_test = (frame.pop("split") == "test").to_numpy()
    targets = frame.pop("income").astype(str).str.contains(">50K").to_numpy()
    features = pd.get_dummies(frame).to_numpy(dtype=np.float32)
    features = (features - features[~is_test].mean(0)) / (features[~is_test].std(0) + 1e-6)
    parts = {"train": ~is_test, "test": is_test}
    found = {f"X_{part}": features[rows] for part, rows in parts.items()}
    return _split(found | {f"y_{part}": targets[rows] for part, rows in parts.items()})


def _codes() -> dict[str, int]:
    return {character: index for index, character in enumerate(sorted(set(text("tinyshakespeare"))))}


@functools.cache
def characters(length: int) -> Split:
    """tinyshakespeare in windows of so many characters and one more; the last tenth is the test text."""
    code = _codes()
    return _windows(torch.tensor([code[character] for character in text("tinyshakespeare")]), length + 1)


@functools.cache
def novels(length: int) -> Split:
    """The same of a million characters of the novels, in Shakespeare's characters; any other is a space."""
    code, corpus = _codes(), text("gutenberg5")
    part = corpus[:1_000_000]
    return _windows(torch.tensor([code.get(character, code[" "]) for character in part]), length + 1)


def _windows(tokens: Tensor, length: int) -> Split:
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    border = int(0.9 * len(windows))
    return Split((windows[:border],), (windows[border:],))


# Text in pieces of words.

PAD, MASK, START, END, UNKNOWN = SPECIAL = ("[PAD]", "[MASK]", "[START]", "[END]", "[UNK]")
PAD_ID, MASK_ID, START_ID, END_ID = range(4)
VOCABULARY = 1024


def cached(name: str, make):
    """What takes long to prepare is kept on disk, for all workers and runs."""
    path = sources.cache_folder() / "prepared" / f"{name}.pt"
    if path.exists():
        return torch.load(path, weights_only=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = make()
    partial = path.with_suffix(f".{os.getpid()}")
    torch.save(made, partial)
    partial.replace(path)  # another worker may have been as fast
    return made


def _tokenizer(name: str, corpus_of):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    def train() -> str:
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False)
        tokenizer.train_from_iterator(corpus_of(), trainer)
        return tokenizer.to_str()

    return Tokenizer.from_str(cached(f"tokenizer-{name}", train))


def _prose() -> list[str]:
    return [line for name in ("gutenberg5", "wikitext2_valid") for line in text(name).splitlines() if line.strip()]


def prose_tokenizer():
    return _tokenizer("prose", _prose)


@functools.cache
def prose(length: int) -> Split:
    """Five novels and WikiText-2's validation text, in windows of so many pieces."""

    def encode() -> Tensor:
        encoded = prose_tokenizer().encode_batch_fast(_prose())
        return torch.tensor([token for line in encoded for token in line.ids], dtype=torch.int32)

    tokens = cached("prose", encode).long()
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    border = int(0.95 * len(windows))
    return Split((windows[:border],), (windows[border:],))


@functools.cache
def intents(name: str, length: int) -> Split:
    """Questions to a bank (Banking77) or an assistant (CLINC150), as pieces of the prose's vocabulary."""
    if name == "banking77":
        parts = [list(csv.reader(io.StringIO(text(f"banking77_{part}"))))[1:] for part in ("train", "test")]
    else:
        everything = json.loads(text("clinc150"))
        parts = [everything["train"], everything["test"]]
    labels = {label: index for index, label in enumerate(sorted({label for _, label in parts[0]}))}
    tokenizer = prose_tokenizer()

    def encode(pairs) -> tuple[Tensor, Tensor]:
        encoded = tokenizer.encode_batch_fast([question for question, _ in pairs])
        tokens = _padded([[START_ID, *line.ids, END_ID] for line in encoded], length)
        return tokens, torch.tensor([labels[label] for _, label in pairs])

    return Split(encode(parts[0]), encode(parts[1]))


def _padded(lines: list[list[int]], length: int) -> Tensor:
    return torch.tensor([line[:length] + [PAD_ID] * (length - len(line)) for line in lines])


@functools.cache
def translations(length: int) -> Split:
    """German and English sentences of Tatoeba; no English sentence is in both parts."""
    pairs = [line.split("\t")[:2] for line in text("tatoeba_deu_eng").split("\n") if line]
    english = sorted({pair[0] for pair in pairs})
    order = torch.randperm(len(english), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = {english[index] for index in order[:2_000]}
    tokenizer = _tokenizer("tatoeba", lambda: [sentence for pair in pairs for sentence in pair])

    def encode() -> list[tuple[Tensor, Tensor]]:
        parts = []
        for is_held_out in (False, True):
            part = [pair for pair in pairs if (pair[0] in held_out) == is_held_out]
            sides = [[pair[side] for pair in part] for side in (1, 0)]
            german, english_ = ([line.ids for line in tokenizer.encode_batch_fast(side)] for side in sides)
            fits = [i for i in range(len(part)) if len(german[i]) <= length and len(english_[i]) <= length - 2]
            source = _padded([german[i] for i in fits], length).short()
            parts.append((source, _padded([[START_ID, *english_[i], END_ID] for i in fits], length).short()))
        return parts

    train, test = (tuple(side.long() for side in part) for part in cached(f"tatoeba-{length}", encode))
    return Split(train, test)
