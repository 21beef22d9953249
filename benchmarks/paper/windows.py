"""Long texts as an endless stream of windows of tokens, which can be continued where it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.paper.setup import Tensors


class Source(NamedTuple):
    """A long text in chunks, each of some documents."""

    chunks: int
    read: Callable[[int], list[str]]
    weight: float  # the share of its windows in what is trained on


class Windows:
    """Without end: so many tokens each, from the chunks in a new order every time. A document's end ends no window."""

    def __init__(self, source: Source, chunks: list[int], tokenizer: Any, length: int, dice: random.Random) -> None:
        self.source, self.chunks, self.tokenizer, self.length, self.dice = source, chunks, tokenizer, length, dice
        self._end = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
        self._unread: list[int] = []  # chunks, the last of them next
        self._ready: list[np.ndarray] = []  # windows, the last of them next
        self._rest = np.empty(0, np.int64)

    def __next__(self) -> np.ndarray:
        while not self._ready:
            if not self._unread:
                self._unread, self._rest = self.dice.sample(self.chunks, len(self.chunks))[::-1], self._rest[:0]
            documents = self.source.read(self._unread.pop())
            encoded = self.tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
            tokens = np.concatenate([self._rest, *(np.asarray([*ids, self._end], np.int64) for ids in encoded)])
            whole = len(tokens) // self.length * self.length
            self._ready, self._rest = list(tokens[:whole].reshape(-1, self.length))[::-1], tokens[whole:]
        return self._ready.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"unread": self._unread, "ready": self._ready, "rest": self._rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._unread, self._ready, self._rest = state["unread"], state["ready"], state["rest"]


class Mixed:
    """Without end: batches of windows of all sources in proportion to their weights, neighbours apart."""

    def __init__(
        self, streams: list[Windows], weights: list[float], dice: random.Random, pool: int, count: int
    ) -> None:
        self.streams, self.weights, self.dice, self.pool, self.count = streams, weights, dice, pool, count
        self._waiting: list[np.ndarray] = []

    def __iter__(self) -> Mixed:
        return self

    def __next__(self) -> Tensors:
        return (torch.from_numpy(np.stack([self._window() for _ in range(self.count)])),)

    def _window(self) -> np.ndarray:
        while len(self._waiting) <= self.pool:
            self._waiting.append(next(self.dice.choices(self.streams, self.weights)[0]))
        place = self.dice.randrange(self.pool)
        self._waiting[place], self._waiting[-1] = self._waiting[-1], self._waiting[place]
        return self._waiting.pop()

    def state_dict(self) -> dict[str, Any]:
        streams = [stream.state_dict() for stream in self.streams]
        return {"waiting": self._waiting, "streams": streams, "dice": self.dice.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting = state["waiting"]
        self.dice.setstate(state["dice"])
        for stream, its in zip(self.streams, state["streams"], strict=True):
            stream.load_state_dict(its)
