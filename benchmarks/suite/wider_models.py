"""The networks of the wider suite, small enough for a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.data.datasets import PAD_ID


def dense(*widths: int, between: Callable[[], nn.Module] = nn.GELU) -> nn.Module:
    """Linear layers of these widths, the first the inputs', with a nonlinearity between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), between()]
    return nn.Sequential(*layers[:-1])


class Factors(nn.Module):
    """A matrix as the product of two narrow ones, and a number per row and per column where ``biased``."""

    def __init__(self, rows: int, columns: int, rank: int, biased: bool = False) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(rows, rank), nn.Embedding(columns, rank)
        for embedding in (self.rows, self.columns):
            nn.init.normal_(embedding.weight, std=0.1)
        self.biases = nn.ModuleList(nn.Embedding(count, 1) for count in (rows, columns)) if biased else None
        for embedding in self.biases or ():
            nn.init.zeros_(embedding.weight)

    def forward(self, row: Tensor, column: Tensor) -> Tensor:
        product = (self.rows(row) * self.columns(column)).sum(-1)
        if self.biases is None:
            return product
        return product + self.biases[0](row).squeeze(-1) + self.biases[1](column).squeeze(-1)


def autoencoder(code: int) -> nn.Module:
    layers = dense(784, 128, code, 128, 784, between=nn.ReLU)
    return nn.Sequential(nn.Flatten(), layers, nn.Unflatten(1, (1, 28, 28)))


class UNet(nn.Module):
    """Two sizes of image, 14 and 7, and the time as features of every pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Sequential(_convolutions(width, width), nn.Conv2d(width, 2 * width, 2, stride=2))
        self.middle = _convolutions(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Sequential(_convolutions(2 * width, width), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        angles = times.unsqueeze(1) * torch.pi * 2.0 ** torch.arange(4, device=times.device)
        condition = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        wide = self.first(images) + condition[:, :, None, None]
        narrow = self.up(self.middle(self.down(wide)))
        return self.last(torch.cat([wide, narrow], 1))


def _convolutions(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.GroupNorm(4, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1), nn.SiLU())


def image_encoder(width: int) -> nn.Module:
    """Of images of 24 x 24."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, width)),
    )


class BagOfPieces(nn.Module):
    """The mean of the embeddings of a sentence's pieces, through two layers."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocabulary, width, mode="mean", padding_idx=PAD_ID)
        self.layers = dense(width, 2 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens))


class DeepSet(nn.Module):
    """Every point on its own, the maximum over the points, then the classes."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.of_point = dense(2, width, width, between=nn.ReLU)
        self.of_set = dense(width, width, classes, between=nn.ReLU)

    def forward(self, points: Tensor) -> Tensor:
        return self.of_set(self.of_point(points).amax(1))


class GraphNetwork(nn.Module):
    """Nodes start with their degree and pass sums to their neighbours; the sum over the nodes is read."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        widths = [1] + [width] * layers
        pairs = list(itertools.pairwise(widths))
        self.own = nn.ModuleList(nn.Linear(before, after) for before, after in pairs)
        self.passed = nn.ModuleList(nn.Linear(before, after, bias=False) for before, after in pairs)
        self.read = dense(width, width, 1, between=nn.ReLU)

    def forward(self, graphs: Tensor) -> Tensor:
        hidden = graphs.mean(-1, keepdim=True)
        for own, passed in zip(self.own, self.passed, strict=True):
            hidden = torch.relu(own(hidden) + passed(graphs @ hidden / graphs.shape[-1] ** 0.5))
        return self.read(hidden.mean(1))


class PatchGRU(nn.Module):
    """Reads an image of 784 pixels as 98 pieces of 8."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(8, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.gru(images.reshape(-1, 98, 8))[1][0])


class LastOfLSTM(nn.Module):
    """One number, when all is read."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, sequences: Tensor) -> Tensor:
        return self.head(self.lstm(sequences)[0][:, -1])
