"""Parameters whose Delta is stored in fewer bytes than the parameters' working dtype has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mechanic.torch.buckets import Bucket
from mechanic.torch.kernels import stored as kernels
from mechanic.torch.kernels.rounding import working_dtype
from mechanic.torch.kernels.storage import Noise, Noises, Stored, blocks_in, decode, encode
from mechanic.torch.layout import DELTA, DELTA_SCALES
from mechanic.torch.shards import is_dtensor, locals_of
from mechanic.tuner import TunerState

if TYPE_CHECKING:
    from typing_extensions import Self

INT8 = "int8"
SHARD = 20
"""Where the number of a shard begins in a parameter's number for rounding."""

CHOICES = (None, torch.float32, torch.bfloat16, INT8)
"""What Mechanic's ``delta`` can be."""

PART = 1 << 20
"""Elements that are lent at a time to a base which steps on Delta: 4 MB of a decoded Delta, or one larger tensor."""


def check_choice(delta: Any) -> None:
    if not (delta is None or (isinstance(delta, torch.dtype | str) and delta in CHOICES)):
        raise ValueError(f"delta must be torch.float32, torch.bfloat16 or 'int8', got {delta!r}")


def dtype_of_delta(dtype: torch.dtype, delta: torch.dtype | str | None) -> torch.dtype:
    """What Delta of a parameter is stored in. That of complex parameters is always in their working dtype."""
    working = working_dtype(dtype)
    if delta is None or dtype.is_complex:
        return working
    chosen = torch.int8 if isinstance(delta, str) else delta
    return chosen if chosen.itemsize < working.itemsize else working


def is_stored(dtype: torch.dtype, delta: torch.dtype | str | None) -> bool:
    """Whether Delta of a parameter takes fewer bytes than its working dtype."""
    return dtype_of_delta(dtype, delta) != working_dtype(dtype)


def noises_of(delta: torch.dtype | str | None, tuner: TunerState, *, again: bool = False) -> Noises | None:
    """What stored Deltas are rounded with in this step; every step has its number, finite or not.

    If they are rounded ``again`` in one step, that has a number too.
    """
    if delta is None:
        return None
    count = tuner.steps[:, 0] + tuner.nonfinite_steps[:, 0]
    return Noises(-1 - count if again else count)


def delta_state_of(p: Tensor, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Delta of a parameter in a dtype, from its state or new; a Delta in another dtype is rounded to nearest."""
    found = state.get(DELTA)
    if dtype != torch.int8:
        return {DELTA: torch.zeros_like(p, dtype=dtype) if found is None else found.to(dtype)}
    if found is not None and DELTA_SCALES in state:
        return {key: state[key] for key in (DELTA, DELTA_SCALES)}
    codes = torch.zeros_like(p, dtype=dtype)
    local = _local(codes)
    scales = torch.zeros(blocks_in(local.numel()), dtype=torch.float32, device=local.device)
    if found is not None:
        encode(_local(found), Stored(local, scales))
    return {DELTA: codes, DELTA_SCALES: scales}


def decoded(entry: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter as a checkpoint has it: with Delta in float32 in place of codes and scales."""
    if DELTA_SCALES not in entry:
        return entry
    delta = torch.empty_like(entry[DELTA], dtype=torch.float32)
    _local(delta).copy_(decode(Stored(_local(entry[DELTA]), entry[DELTA_SCALES])))
    kept = {key: value for key, value in entry.items() if key != DELTA_SCALES}
    return {**kept, DELTA: delta}


def _local(tensor: Tensor) -> Tensor:
    return locals_of([tensor], sharded=is_dtensor(tensor))[0]


@dataclass
class StoredBucket(Bucket):
    """A bucket whose Deltas are decoded where they are needed, and encoded once they have changed.

    The parameters stay as they are until the base has stepped, also if it steps on Delta, which is then a decoded one:
    so a base that fails has changed nothing but its own state.

    ``in_own_dtype``, of bfloat16 parameters, the base steps on zeros in bfloat16 with the gradients as they are, and
    makes its state as it does by itself. What it leaves is u. Added to Delta in bfloat16, most of u would be lost.
    """

    in_own_dtype: bool = False
    stored_in: torch.dtype = torch.float32  # Delta
    numbers: list[int] = field(default_factory=list)  # of the parameters, for rounding

    @property
    def lends_delta(self) -> bool:
        return False

    @property
    def stored(self) -> list[Stored]:
        lists = zip(self.deltas, self.mechanic_state, self.numbers, strict=True)
        return [Stored(codes, kept.get(DELTA_SCALES), number) for codes, kept, number in lists]

    def measure(self) -> Tensor:
        if not self.moves:
            return super().measure()
        sums = kernels.measure(self._local_params(), self._grads(), self.stored, self.sign, self.device)
        return sums if self.weight == 1 else sums * self.weight

    @property
    def lent_dtype(self) -> torch.dtype:
        return self.dtype if self.in_own_dtype else super().lent_dtype

    def _to_lend(self) -> list[Tensor]:
        if self.in_own_dtype:
            return [torch.zeros_like(x) for x in self._local_params()]
        if self.steps_on_delta:
            values = self._values() if self.decay else []
            dtype = working_dtype(self.dtype)
            return kernels.working_deltas(self.stored, dtype, self._retention(), values, self.decay)
        copies = self._values(copy=True)
        if self.own_iterates:
            kernels.add_scaled(copies, self.stored, self._offset_along_delta())
        return copies

    def give_up(self, stepped: list[Tensor], forgotten: set[Tensor]) -> None:
        """Nothing has changed."""

    def move(self, stepped: list[Tensor]) -> None:
        if not self.moves:
            return
        before, after, delta_retention, _ = self._require_scaling()
        retention = self._retention()
        if stepped and self.in_own_dtype:
            before = before if delta_retention is None else before / delta_retention
            scales = self._scalar(before), self._scalar(after - before)
            lists = self._local_params(), self.residuals, stepped, self.stored
            kernels.add_updates(*lists, *scales, retention, self.decay, self._noise())
            return
        values = self._values()
        if stepped and self.steps_on_delta:
            scales = self._scalar(before), self._scalar(after)
            kernels.move_along(values, stepped, self.stored, *scales, self._noise())
            self._store(values)
            return
        if stepped and self.own_iterates:
            kernels.add_scaled(stepped, self.stored, -self._offset_along_delta())
        if delta_retention is not None:
            before = before / delta_retention
        change = self._scalar(after - before)
        if stepped:
            scale = self._scalar(before)
            kernels.combine(values, stepped, self.stored, scale, change, retention, self._noise())
        else:
            kernels.rescale(values, self.stored, change, retention, self._noise())
        self._store(values)

    def move_back(self) -> None:
        if self.moves:
            values = self._values()
            before, after, _, _ = self._require_scaling()
            kernels.add_scaled(values, self.stored, self._scalar(before - after))
            self._store(values)

    def move_frozen(self, stepped: list[Tensor], scale: Tensor | None) -> None:
        if not self.in_own_dtype:
            super().move_frozen(stepped, scale)
            return
        assert scale is not None, "the base has stepped at its own lr"
        kernels.add_frozen_updates(self._local_params(), self.residuals, stepped, self._scalar(scale), self.decay)

    def part(self, first: int, end: int, **lists: Any) -> Self:
        return super().part(first, end, numbers=self.numbers[first:end])

    def number_as(self, numbers: list[int]) -> None:
        """Round as the parameters of these numbers, if this bucket was made of a part of the parameters only."""
        self.numbers = [number >> SHARD << SHARD | new for number, new in zip(self.numbers, numbers, strict=True)]

    def _noise(self) -> Noise:
        noises = self._require_scaling().noises
        assert noises is not None, "the step knows of stored Deltas"
        return noises.of(self.row, self.device)


def parts_of(buckets: list[Bucket]) -> list[list[Bucket]]:
    """Buckets that a base is to be lent one after the other, so that few Deltas are decoded at a time.

    Only a base that is known to step every parameter by itself steps on Delta; any other gets all in one part.
    """
    if not any(isinstance(bucket, StoredBucket) and bucket.steps_on_delta for bucket in buckets):
        return [buckets]
    parts: list[list[Bucket]] = [[]]
    elements = 0
    for bucket in buckets:
        for some in bucket.split(PART) if isinstance(bucket, StoredBucket) else (bucket,):
            size = sum(p.numel() for p in some.params) if some.has_grad else 0
            if parts[-1] and elements + size > PART:
                parts.append([])
                elements = 0
            parts[-1].append(some)
            elements += size
    return parts
