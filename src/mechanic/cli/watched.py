"""One optimizer that ``mechanic run`` has wrapped."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from mechanic.torch.base import is_linear_in_lr
from mechanic.torch.layout import Group, scale_of

_LONGEST = 60  # characters of an argument that is shown


class Watched:
    """One wrapped optimizer: where it was built, with what, and its last groups.

    It keeps the tuners and no parameter, so that a script can free its models.
    """

    def __init__(self, optimizer: Any, place: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.cls: type = type(optimizer.base)
        self.place = place
        self.call = _call_of(self.cls, args, kwargs)
        self.is_linear = is_linear_in_lr(optimizer.base)  # a learning rate can stand for what was learned
        self.steps = 0
        lrs = (group.get("lr") for group in optimizer.param_groups)
        self.built_lrs = [None if lr is None else float(lr) for lr in lrs]
        self.largest_lrs: list[float | None] = []  # of the steps so far, by group; None where it is a tensor
        self.groups: list[Group] = []
        self.half_scales: list[float] = []  # of the groups, halfway through a probe
        self.note(optimizer)

    def note(self, optimizer: Any) -> None:
        """Keep the groups as they are now, without their parameters. Waits for no device."""
        kept = optimizer.param_groups
        self.groups = [{key: value for key, value in group.items() if key != "params"} for group in kept]
        if self.steps:
            lrs = [group["lr"] if isinstance(group.get("lr"), float | int) else None for group in kept]
            former = [*self.largest_lrs, *lrs[len(self.largest_lrs) :]]
            self.largest_lrs = [
                None if lr is None or largest is None else max(lr, largest)
                for lr, largest in zip(lrs, former, strict=False)
            ]

    def scales(self) -> list[float]:
        """S of every group."""
        return [float(scale_of(group)) for group in self.groups]

    def is_rising(self) -> bool:
        """Whether a scale has grown by more than half since the middle of a probe."""
        return any(now > 1.5 * half for now, half in zip(self.scales(), self.half_scales, strict=False))


def _call_of(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """The arguments of a call but for the parameters and lr, as they would be written."""
    passed = dict(kwargs)
    with contextlib.suppress(TypeError, ValueError):  # one without a signature, or with another one
        signature = inspect.signature(cls)
        passed = dict(signature.bind(*args, **kwargs).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                passed |= passed.pop(parameter.name, {})
    shown = {name: repr(value) for name, value in passed.items() if name not in ("params", "lr")}
    return {name: text if len(text) <= _LONGEST and "\n" not in text else "..." for name, text in shown.items()}
