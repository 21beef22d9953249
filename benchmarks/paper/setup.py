"""What models and data need to know of a run, and the names of what both take from the Hub."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BERT = "google-bert/bert-base-uncased"  # whose vocabulary BERT-L shares
GPT2 = "openai-community/gpt2"
VIT = "google/vit-base-patch16-224-in21k"
PIECES = {"bert": 30_522, "gpt": 50_257, "iwslt14": 10_000}  # sizes of the vocabularies

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Setup:
    """What model and data need to know of a run."""

    small: bool = False
    start: str | None = None  # a checkpoint's folder or name on the Hub
    dropout: float = 0.1
    batch: int = 8  # of all ranks together
    evaluated: int = 64  # samples of the train and of the held-out data, of all ranks together
    rank: int = 0
    ranks: int = 1

    def cut(self, length: int) -> int:
        return min(length, 32) if self.small else length
