"""The columns of the matrix, each built as its authors advise."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer


@dataclass(frozen=True)
class Contender:
    """One column: an optimizer class, or a tuner around a base class."""

    key: str
    title: str
    package: str
    lr: float
    make: Callable[..., Optimizer]  # make(params, lr=..., **options)
    options_of: Callable[[], Callable[..., Any]]  # whose signature tells the options
    with_base: Callable[[type[Optimizer]], Callable[..., Optimizer]] | None = None
    options_where_sharded: tuple[tuple[str, Any], ...] = ()

    def build(self, params: Iterable[Any], lr: Any = None, **options: Any) -> Optimizer:
        """The optimizer, ready to train."""
        optimizer = self.make(params, lr=self.lr if lr is None else lr, **options)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    def takes(self, option: str) -> bool:
        return option in inspect.signature(self.options_of()).parameters

    @property
    def version(self) -> str:
        if self.key == "mechanic":
            from mechanic import __version__

            return __version__
        return importlib.metadata.version(self.package)


def _mechanic_around(base: type[Optimizer]) -> Callable[..., Optimizer]:
    from mechanic.torch import Mechanic

    return lambda params, **options: Mechanic(base(params, **options))


def _mechanic_pytorch_around(base: type[Optimizer]) -> Callable[..., Optimizer]:
    from mechanic_pytorch import mechanize

    made: Callable[..., Optimizer] = mechanize(base)
    return made


def _prodigy() -> type[Optimizer]:
    from prodigyopt import Prodigy

    return Prodigy


def _d_adaptation() -> type[Optimizer]:
    from dadaptation import DAdaptAdam

    return DAdaptAdam


def _schedule_free() -> type[Optimizer]:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree


def _prodigy_plus() -> type[Optimizer]:
    from prodigyplus import ProdigyPlusScheduleFree

    return ProdigyPlusScheduleFree


def _alone(
    key: str, title: str, package: str, lr: float, cls: Callable[[], type[Optimizer]], **where_sharded: Any
) -> Contender:
    """An optimizer without a base. Its class is imported when it is needed."""
    return Contender(
        key,
        title,
        package,
        lr,
        lambda params, **options: cls()(params, **options),
        cls,
        options_where_sharded=tuple(where_sharded.items()),
    )


def _around_adamw(key: str, title: str, package: str, around: Callable[[type[Optimizer]], Any]) -> Contender:
    return Contender(
        key,
        title,
        package,
        1.0,
        lambda params, **options: around(torch.optim.AdamW)(params, **options),
        lambda: torch.optim.AdamW,
        around,
    )


ALL = [
    _around_adamw("mechanic", "Mechanic (ours)", "mechanic", _mechanic_around),
    _around_adamw("mechanic-pytorch", "mechanic-pytorch", "mechanic-pytorch", _mechanic_pytorch_around),
    _alone("prodigy", "Prodigy", "prodigyopt", 1.0, _prodigy, fsdp_in_use=True),
    _alone("d-adaptation", "D-Adaptation", "dadaptation", 1.0, _d_adaptation, fsdp_in_use=True),
    # These two do not learn their learning rate. 0.01 suits the task of the matrix.
    _alone("schedule-free", "Schedule-Free", "schedulefree", 0.01, _schedule_free),
    _alone("prodigy-plus", "Prodigy + Schedule-Free", "prodigy-plus-schedule-free", 1.0, _prodigy_plus),
    _alone("adamw", "AdamW", "torch", 0.01, lambda: torch.optim.AdamW),
]
CONTENDERS = {contender.key: contender for contender in ALL}
