"""Data that are made here, and real data changed: regressions, points, graphs, sequences, long tails, false labels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.data import datasets
from benchmarks.data.datasets import Split


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _cut(tensors: tuple[Tensor, ...], train: int) -> Split:
    """The first rows to train on, the rest to test; for rows in no order."""
    return Split(tuple(t[:train] for t in tensors), tuple(t[train:] for t in tensors))


def _shuffled(inputs: np.ndarray, targets: np.ndarray, train: int) -> Split:
    """Shuffled, and the targets standardised by the train rows; each target is a row of one number."""
    order = torch.randperm(len(inputs), generator=_generator())
    found, answers = torch.from_numpy(inputs).float()[order], torch.from_numpy(targets).float()[order, None]
    return _cut((found, (answers - answers[:train].mean()) / answers[:train].std()), train)


@functools.cache
def diabetes() -> Split:
    """442 patients, 10 numbers each (scikit-learn): how far the disease has gone a year later."""
    from sklearn.datasets import load_diabetes

    inputs, targets = load_diabetes(return_X_y=True)
    return _shuffled(inputs / inputs.std(0), targets, train=354)


@functools.cache
def friedman() -> Split:
    """Friedman's first function of five of ten numbers, with noise (scikit-learn)."""
    from sklearn.datasets import make_friedman1

    inputs, targets = make_friedman1(n_samples=3000, noise=1.0, random_state=0)
    return _shuffled((inputs - 0.5) * 12**0.5, targets, train=2000)


@functools.cache
def sine_of_sum() -> Split:
    """The sine of a random sum of 20 normal numbers: as good as unrelated to each of them."""
    generator = _generator()
    inputs, weights = torch.randn(3000, 20, generator=generator), torch.randn(20, 1, generator=generator)
    return _cut((inputs, torch.sin(inputs @ weights)), train=2000)


@functools.cache
def robot_arm(joints: int = 5) -> Split:
    """Where the hand of a planar arm is, from the angles of its joints, each within a right angle of straight."""
    angles = (torch.rand(5000, joints, generator=_generator()) - 0.5) * torch.pi
    directions = angles.cumsum(1)
    lengths = torch.linspace(1.0, 0.5, joints)
    hand = torch.stack([(lengths * directions.cos()).sum(1), (lengths * directions.sin()).sum(1)], 1)
    return _cut((angles, hand), train=4000)


@functools.cache
def heavy_tails() -> Split:
    """A linear function of 50 numbers, and noise without a third moment: Student's t of 2.5. The test has no noise."""
    generator = _generator()
    inputs, weights = torch.randn(5000, 50, generator=generator), torch.randn(50, 1, generator=generator) / 50**0.5
    targets = inputs @ weights
    noise = np.random.default_rng(0).standard_t(2.5, size=(4000, 1))
    targets[:4000] += torch.from_numpy(noise).float()
    return _cut((inputs, targets), train=4000)


@functools.cache
def points(left: float) -> Split:
    """Where a network of physics is asked, as (x, t) in [left, 1] x [0, 1]: inside, at the borders, at the start."""
    generator = _generator()
    x, t = torch.rand(2, 3000, 3, generator=generator)
    x = left + (1 - left) * x
    x[:, 1] = torch.where(x[:, 1] < (left + 1) / 2, left, 1.0)
    t[:, 2] = 0.0
    return _cut((*torch.stack([x, t], -1).unbind(1), x), train=2000)


@functools.cache
def low_rank(rows: int = 200, columns: int = 150, rank: int = 5) -> Split:
    """A fifth of the entries of a matrix of low rank, with noise: row, column, value. As many others are the test."""
    generator = _generator()
    left, right = torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)
    entries = torch.randperm(rows * columns, generator=generator)[: 2 * rows * columns // 5]
    values = (left @ right / rank**0.5).flatten()[entries]
    values += 0.1 * torch.randn(len(entries), generator=generator)
    return _cut((entries // columns, entries % columns, values), train=len(entries) // 2)


@functools.cache
def co_occurrences(window: int = 5) -> Split:
    """How often two characters are close in tinyshakespeare: first, second, logarithm. The last tenth is the test."""
    corpus = datasets.text("tinyshakespeare")
    code = {character: index for index, character in enumerate(sorted(set(corpus)))}
    text = torch.tensor([code[character] for character in corpus])
    border = int(0.9 * len(text))

    def counted(part: Tensor) -> tuple[Tensor, ...]:
        counts = torch.zeros(len(code), len(code))
        for distance in range(1, window + 1):
            pairs = part[:-distance] * len(code) + part[distance:]
            counts += torch.bincount(pairs, minlength=len(code) ** 2).view(len(code), -1) / distance
        counts = (counts + counts.T) * 1e6 / len(part)
        first, second = counts.nonzero(as_tuple=True)
        return first, second, counts[first, second].log()

    return Split(counted(text[:border]), counted(text[border:]))


@functools.cache
def small_images(name: str) -> Split:
    """14 x 14 pixels, and no labels."""
    split = datasets.images(name)
    return Split(*((torch.nn.functional.avg_pool2d(part[0], 2),) for part in split))


@functools.cache
def lit_pixels(count: int = 64) -> Split:
    """Digits as sets: where so many random ones of the lit pixels are, in [-1, 1]. [samples, count, 2]."""
    split, generator = datasets.images("mnist"), _generator()

    def sets(images: Tensor) -> Tensor:
        lit = (images.flatten(1) > 0.5).float() + 1e-9  # no digit is without lit pixels; were one, any would do
        chosen = torch.multinomial(lit, count, replacement=True, generator=generator)
        return torch.stack([chosen % 28, chosen // 28], -1) / 13.5 - 1

    return Split(*((sets(images), labels) for images, labels in split))


@functools.cache
def triangles(nodes: int = 16) -> Split:
    """Random graphs of different densities as matrices, and how many triangles they have, standardised."""
    generator = _generator()
    density = 0.1 + 0.5 * torch.rand(3000, 1, 1, generator=generator)
    upper = (torch.rand(3000, nodes, nodes, generator=generator) < density).float().triu(1)
    graphs = upper + upper.mT
    counts = (graphs @ graphs @ graphs).diagonal(dim1=1, dim2=2).sum(-1, keepdim=True) / 6
    return _cut((graphs, (counts - counts[:2000].mean()) / counts[:2000].std()), train=2000)


@functools.cache
def adding(length: int = 60) -> Split:
    """Numbers of which two are marked: their sum (Hochreiter and Schmidhuber 1997). [samples, length, 2]."""
    generator = _generator()
    numbers, half = torch.rand(6000, length, generator=generator), length // 2
    marks = torch.zeros_like(numbers)
    for start in (0, half):
        marks.scatter_(1, torch.randint(start, start + half, (6000, 1), generator=generator), 1.0)
    return _cut((torch.stack([numbers, marks], -1), (numbers * marks).sum(1, keepdim=True)), train=5000)


@functools.cache
def parity(bits: int = 20, counted: int = 3) -> Split:
    """Whether an odd number of the first three bits is set; the other bits say nothing."""
    bits_ = torch.randint(2, (12_000, bits), generator=_generator())
    return _cut((2.0 * bits_ - 1, bits_[:, :counted].sum(1) % 2), train=10_000)


# Changes of a classification. The test stays as it is.


def _relabelled(split: Split, kept: Tensor, labels: Tensor) -> Split:
    return Split((split.train[0][kept], labels[kept]), split.test)


@functools.cache
def long_tail(of: Callable[[], Split], ratio: float) -> Split:
    """Class by class rarer, down to one sample of the last where the first has ``ratio``."""
    split = of()
    labels = split.train[1]
    order = torch.randperm(len(labels), generator=_generator())
    counts = labels.bincount()
    kept = []
    for label in range(len(counts)):
        share = ratio ** (-label / (len(counts) - 1))
        of_label = order[labels[order] == label]
        kept.append(of_label[: max(1, round(share * len(of_label)))])
    return _relabelled(split, torch.cat(kept), labels)


@functools.cache
def false_labels(of: Callable[[], Split], share: float) -> Split:
    """So many of the train labels are replaced by any label, which may be the right one."""
    split, generator = of(), _generator()
    labels = split.train[1]
    random = torch.randint(int(labels.max()) + 1, labels.shape, generator=generator)
    replaced = torch.rand(labels.shape, generator=generator) < share
    return _relabelled(split, torch.arange(len(labels)), torch.where(replaced, random, labels))
