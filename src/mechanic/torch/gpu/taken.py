"""Which parameters the kernels can take, and buckets of those: the rest stays with the eager kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mechanic.torch.buckets import Bucket, repoint
from mechanic.torch.gpu import columns
from mechanic.torch.kernels.rounding import is_half_precision
from mechanic.torch.kernels.whole import flat_views
from mechanic.torch.layout import DELTA_SCALES
from mechanic.torch.stored import StoredBucket

BucketT = TypeVar("BucketT", bound=Bucket)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Taken(Bucket):
    """A bucket whose work is done by launches over all such buckets, not by kernels of its own."""

    lent: list[Tensor] = field(default_factory=list)  # what the base is to step on
    lent_grads: list[Tensor] = field(default_factory=list)  # of parameters in half precision
    stored_in: torch.dtype = torch.float32  # Delta; this and what follows are those of StoredBucket
    in_own_dtype: bool = False
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = self.numbers or [0] * len(self.params)

    @property
    def is_half(self) -> bool:
        return is_half_precision(self.dtype)

    def lists(self) -> dict[int, list[Tensor]]:
        """The tensors by column of the table, as far as there are any."""
        lists = {columns.X: self._local_params(), columns.G: self._grads(), columns.D: self.deltas}
        if self.is_half and self.moves:
            lists[columns.R] = self.residuals
        if self.stored_in == torch.int8 and self.moves:
            lists[columns.DELTA_SCALES] = [kept[DELTA_SCALES] for kept in self.mechanic_state]
        if self.lent:
            lists[columns.M] = self.lent
        if self.lent_grads:
            lists[columns.V] = self.lent_grads
        return {column: tensors for column, tensors in lists.items() if tensors}

    @property
    def base_dtype(self) -> torch.dtype:
        """Of what the base makes its update and its state in."""
        return self.dtype if self.in_own_dtype else torch.float32

    def make_room(self) -> None:
        """Allocate what the base is to step on; a launch fills it."""
        if not self.has_grad:
            return
        if self.steps_on_delta:
            self.lent = self.deltas
        else:
            self.lent = [torch.empty_like(x, dtype=torch.float32) for x in self._local_params()]
        if self.is_half:
            self.lent_grads = [torch.empty_like(g, dtype=torch.float32) for g in self._grads()]

    def lend(self) -> None:
        for index, (p, data) in enumerate(zip(self.params, self._data(), strict=True)):
            self._originals.append((data, p.grad if self.is_half else None))
            repoint(p, self.lent[index], self.lent_grads[index] if self.is_half else None)

    def move(self, stepped: list[Tensor]) -> None:
        """A launch does it. It reads what was lent, so if the base has put other data in its place, copy that."""
        for lent, tensor in zip(self.lent, stepped, strict=False):
            if tensor.data_ptr() != lent.data_ptr():
                lent.copy_(tensor)


def divide(buckets: list[Bucket], device: torch.device) -> tuple[list[Taken], list[Bucket]]:
    """The parameters that the kernels take, and the others. All on ``device`` are taken that are dense and real."""
    taken: list[Taken] = []
    left: list[Bucket] = []
    for bucket in buckets:
        if bucket.device != device or bucket.dtype not in DTYPES:
            left.append(bucket)
            continue
        whole = Taken(**{each.name: getattr(bucket, each.name) for each in fields(bucket)})
        lists = whole.lists()
        fits = [_fits(tensors, lists, whole.stored_in) for tensors in zip(*lists.values(), strict=True)]
        if all(fits):
            taken.append(whole)
            continue
        left.append(_chosen(bucket, [not fit for fit in fits]))
        if any(fits):
            taken.append(_chosen(whole, fits))
    return taken, left


def _fits(tensors: tuple[Tensor, ...], lists: dict[int, list[Tensor]], stored_in: torch.dtype) -> bool:
    by_column = dict(zip(lists, tensors, strict=True))
    if columns.G in by_column and (by_column[columns.G].dtype not in DTYPES or by_column[columns.G].is_neg()):
        return False
    scales = by_column.pop(columns.DELTA_SCALES, None)
    if columns.D in by_column and by_column[columns.D].dtype != stored_in:
        return False
    return (scales is None or scales.is_contiguous()) and are_alike(tuple(by_column.values()))


def are_alike(tensors: tuple[Tensor, ...]) -> bool:
    """Whether tensors of one shape have their elements in the same order, without gaps."""
    return all(tensor.is_contiguous() for tensor in tensors) or flat_views(tensors) is not None


def _chosen(bucket: BucketT, wanted: list[bool]) -> BucketT:
    lists: dict[str, list[Any]] = {"params": bucket.params, "mechanic_state": bucket.mechanic_state}
    if isinstance(bucket, StoredBucket | Taken):
        lists["numbers"] = bucket.numbers
    chosen: dict[str, Any] = {
        name: [each for each, wants in zip(of, wanted, strict=True) if wants] for name, of in lists.items()
    }
    return replace(bucket, **chosen, _originals=[])
