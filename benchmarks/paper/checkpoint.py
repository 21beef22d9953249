"""A long run of several ranks on disk, one file per rank: restarted on as many ranks, it continues where it was."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.paper.data import agreed
from benchmarks.suite.partial import Partial

ASKED_EVERY = 10  # steps: the ranks have to agree on when, and to ask costs them time


class Shard(NamedTuple):
    """A rank's part of a tensor, without the processes it belongs to."""

    local: Tensor
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def unsharded(value: Any) -> Any:
    """With shards that a file can keep in the place of distributed tensors, at any depth."""
    if isinstance(value, DTensor):
        return Shard(value.to_local(), value.placements, value.shape, value.stride())
    if isinstance(value, dict):
        return {key: unsharded(inner) for key, inner in value.items()}
    return [unsharded(inner) for inner in value] if isinstance(value, list) else value


def sharded(value: Any, mesh: DeviceMesh) -> Any:
    """The way back."""
    if isinstance(value, Shard):
        local, placements, shape, stride = value
        return DTensor.from_local(local.to(mesh.device_type), mesh, placements, shape=shape, stride=stride)
    if isinstance(value, dict):
        return {key: sharded(inner, mesh) for key, inner in value.items()}
    return [sharded(inner, mesh) for inner in value] if isinstance(value, list) else value


class Checkpoint:
    """The last two states of this rank.

    All ranks save after the same steps, and none goes on before all have. So one that was killed while it saved still
    has the state before, and so have all others.
    """

    def __init__(self, path: Path, origin: dict[str, Any], minutes: float) -> None:
        """What has been saved under another ``origin`` is not continued."""
        self.path, self.origin, self.minutes = path, origin, minutes
        self._saved = time.monotonic()

    def due(self, step: int) -> bool:
        """The same on all ranks, by the clock of the first."""
        if step % ASKED_EVERY:
            return False
        return agreed(lambda: time.monotonic() - self._saved >= 60 * self.minutes)

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._partial(step).save(unsharded(state))
        for old in sorted(self._own())[:-2]:
            self._partial(old).path.unlink()
        self._saved = time.monotonic()

    def load(self, mesh: DeviceMesh) -> dict[str, Any] | None:
        """The newest that all ranks have; None if there is none, or one rank's is of other code or another machine."""
        steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, self._own())
        common = set.intersection(*steps)
        state = self._partial(max(common)).load() if common else None
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, state is not None)
        return sharded(state, mesh) if all(found) else None

    def remove(self) -> None:
        for step in self._own():
            self._partial(step).path.unlink()

    def _partial(self, step: int) -> Partial:
        return Partial(self.path.with_name(f"{self._stem()}{step}.pt"), self.origin, self.minutes)

    def _stem(self) -> str:
        return f"{self.path.stem}-{dist.get_rank()}-of-{dist.get_world_size()}-step"

    def _own(self) -> set[int]:
        """The steps that this rank has saved."""
        names = (path.name for path in self.path.parent.glob(f"{self._stem()}*.pt"))
        return {int(re.fullmatch(r".*step(\d+)\.pt", name)[1]) for name in names}
