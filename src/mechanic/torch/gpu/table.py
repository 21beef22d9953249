"""The table of addresses and numbers that the kernels read, and the map from programs to chunks of tensors."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mechanic.torch.gpu import columns

ALIGNMENT = 16  # bytes

Numbers = tuple[float, ...]
"""A row of :mod:`mechanic.torch.gpu.columns`."""


class Kind(NamedTuple):
    """Tensors of one kind are worked on by one launch."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    rule: int = 0  # of the step
    slots: int = 0  # how many tensors the rule keeps
    counts: bool = False  # whether steps are counted on the device
    delta_dtype: torch.dtype = torch.float32
    base_dtype: torch.dtype = torch.float32  # of what the base keeps, and of its update

    @property
    def is_half(self) -> bool:
        return self.dtype != torch.float32


class Listed(NamedTuple):
    """Some tensors of one kind and one tuner."""

    kind: Kind
    tuner: int
    lists: dict[int, list[Tensor]]  # by column of the table
    numbers: list[Numbers]  # by tensor
    rates: list[Tensor | None]  # learning rates on the device, by tensor
    places: list[int]  # of the tensors, for rounding stored Deltas


class Span(NamedTuple):
    """The programs of one kind, and which of them belong to each tuner."""

    kind: Kind
    first: int
    programs: int
    of_tuner: list[tuple[int, int]]  # first and last + 1, by tuner


Rest = Callable[[list[Span]], Iterable[int]]
"""Makes the words that follow those of the tensors."""


class _ChangesError(Exception):
    """The table would have to change."""


def bits(number: float) -> int:
    """A number as a word."""
    return array("q", array("d", [number]).tobytes())[0]


class Table:
    """Keeps the table on the device and uploads it in one copy, if anything in it has changed.

    Addresses are read anew in every step: gradients move, and so does all else when a checkpoint is loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.uploads = 0
        self.tensors = 0
        self.words = torch.empty(0, dtype=torch.int64, device=device)
        self.where = torch.empty(0, 2, dtype=torch.int32, device=device)
        self.spans: list[Span] = []
        self.offset_of_rest = 0  # in words
        self._content = b""
        self._sizes: tuple[Any, ...] | None = None
        self._pinned: list[Tensor] = []
        self._held: list[Tensor] = []  # by CUDA graphs
        self._may_change = True

    @property
    def programs(self) -> int:
        return len(self.where)

    def fill_and_hold(self, listed: Sequence[Listed], tuners: int, rest: Rest) -> bool:
        """Keep the table as it is and where it is, for a CUDA graph that reads it in every replay.

        Returns False if it would have to change for these tensors.
        """
        self._may_change = False
        try:
            self.fill(listed, tuners, rest)
        except _ChangesError:
            self._content, self._sizes = b"", None  # made anew with the next step
            return False
        finally:
            self._may_change = True
        self._held += [each for each in (self.words, self.where) if not self._is_held(each)]
        return True

    def _is_held(self, tensor: Tensor) -> bool:
        return any(tensor is held for held in self._held)

    def fill(self, listed: Sequence[Listed], tuners: int, rest: Rest) -> None:
        """Describe these tensors. ``rest`` makes the words that follow them."""
        listed = sorted(listed, key=lambda part: (str(part.kind), part.tuner))
        rows: dict[Numbers, int] = {}
        words = array("q")
        sizes = []
        for part in listed:
            words.extend(_records(part, rows))
            sizes.append((part.kind, part.tuner, [x.numel() for x in part.lists[columns.X]]))
        self.tensors = len(words) // columns.RECORD
        self._arrange(sizes, tuners)
        numbers = array("d", [number for row in rows for number in row])
        self.offset_of_rest = len(words) + len(numbers)
        content = words.tobytes() + numbers.tobytes() + array("q", rest(self.spans)).tobytes()
        if content != self._content:
            self._content = content
            self.uploads += 1
            self.words = self._copied(torch.frombuffer(bytearray(content), dtype=torch.int64), self.words)

    def _copied(self, words: Tensor, former: Tensor) -> Tensor:
        """A copy on the device."""
        if not self._may_change:
            raise _ChangesError
        if self.device.type == "cpu":
            return words
        # A new pinned tensor each time: the host may be ahead of the copy from the last one.
        pinned = torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True).copy_(words)
        self._pinned = [*self._pinned[-1:], pinned]
        return self.room(words, former).copy_(pinned, non_blocking=True)

    def room(self, words: Tensor, former: Tensor) -> Tensor:
        """Memory for a copy: that of the former one if it has the same size and no graph reads it."""
        fits = former.shape == words.shape and not self._is_held(former)
        return former if fits else torch.empty_like(words, device=self.device)

    def _arrange(self, sizes: list[tuple[Kind, int, list[int]]], tuners: int) -> None:
        """Share the tensors among programs, again only if their sizes have changed."""
        key = (columns.CHUNK, tuners, *((kind, tuner, tuple(of_part)) for kind, tuner, of_part in sizes))
        if key == self._sizes:
            return
        self._sizes = key
        self.spans, where, tensor = [], array("i"), 0
        for kind, tuner, of_part in sizes:
            if self.spans and self.spans[-1].kind != kind and len(where) % 4:
                where.extend((0, 0))  # spans begin at an even program, so that their part of an array is aligned
            first = len(where) // 2
            for size in of_part:
                for chunk in range(-(-size // columns.CHUNK)):
                    where.extend((tensor, chunk))
                tensor += 1
            last = len(where) // 2
            if not self.spans or self.spans[-1].kind != kind:
                self.spans.append(Span(kind, first, 0, [(0, 0)] * tuners))
            span = self.spans[-1]
            begin = span.of_tuner[tuner][0] if span.of_tuner[tuner] != (0, 0) else first
            span.of_tuner[tuner] = begin, last
            self.spans[-1] = Span(kind, span.first, last - span.first, span.of_tuner)
        self.where = self._copied(torch.tensor(where, dtype=torch.int32, device="cpu").reshape(-1, 2), self.where)


def _records(part: Listed, rows: dict[Numbers, int]) -> list[int]:
    """The records of tensors, and in ``rows`` the numbers that they use."""
    count = len(part.lists[columns.X])
    none = [0] * count
    addresses = [
        [tensor.data_ptr() for tensor in part.lists[column]] if column in part.lists else none
        for column in range(columns.STEP + 1)
    ]
    words = []
    has_all = columns.G in part.lists and columns.D in part.lists
    for index, (*of_lists, step) in enumerate(zip(*addresses, strict=True)):
        numbers = rows.setdefault(part.numbers[index], len(rows))
        rate = part.rates[index]
        quick = has_all and not any(address % ALIGNMENT for address in of_lists)
        of_tensor = part.lists[columns.X][index].numel(), part.tuner, numbers, quick, part.places[index]
        words += [*of_lists, step, 0 if rate is None else rate.data_ptr(), *of_tensor]
    return words
