"""Character-level tinyshakespeare and a small transformer, where the data is at hand."""

import functools
import lzma
import os
from pathlib import Path

import pytest
import torch
from torch import nn

CONTEXT = 32


@functools.cache
def characters():
    """The text as numbers, from ``$MECHANIC_DATA/text/tinyshakespeare.txt.xz``."""
    folder = os.environ.get("MECHANIC_DATA")
    path = Path(folder or ".") / "text" / "tinyshakespeare.txt.xz"
    if not folder or not path.exists():
        pytest.skip("needs tinyshakespeare: set MECHANIC_DATA to a folder with text/tinyshakespeare.txt.xz")
    text = lzma.decompress(path.read_bytes()).decode()
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text])


def windows(seed, size):
    """Contexts and the characters that follow each of their prefixes."""
    text = characters()
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=torch.Generator().manual_seed(seed))
    rows = starts[:, None] + torch.arange(CONTEXT + 1)
    return text[rows[:, :-1]], text[rows[:, 1:]]


class Transformer(nn.Module):
    """Two pre-norm blocks of width 32, no dropout."""

    def __init__(self, width=32, heads=4, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(65, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) / 10)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 65)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask.to(x.dtype), is_causal=True)
        return self.head(x)
