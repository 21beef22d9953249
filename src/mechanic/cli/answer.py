"""What ``mechanic run`` says at the end: the learned rates, and the line that trains with them without Mechanic."""

from __future__ import annotations

from typing import Any

import torch

from mechanic.cli.watched import Watched
from mechanic.torch.layout import PEAK_LR, ROW, Group, learned_rate_of


def describe(watched: Watched) -> str:
    """Some lines on one optimizer."""
    name, steps = watched.cls.__name__, f"{watched.steps} step" + ("" if watched.steps == 1 else "s")
    rates = [_peak_rate(group, _peak_of(watched, index)) for index, group in enumerate(watched.groups)]
    lines = [f"{name} at {watched.place}, {steps}"]
    if not any(rates):
        return "\n".join([*lines, "  no learning rate was learned; it takes some steps with gradients"])
    if len(set(rates)) == 1 and len({group[ROW] for group in watched.groups}) == 1:
        lines.append(f"  learned rate: {rates[0]:.3g} ({_passed(watched, 0)})")
    else:
        for index, rate in enumerate(rates):
            own_name = watched.groups[index].get("tuner")
            tuner = "" if own_name is None else f" ({own_name})"
            lines.append(f"  learned rate of group {index}{tuner}: {rate:.3g} ({_passed(watched, index)})")
    return "\n".join(lines + _replacement(watched, rates))


def _replacement(watched: Watched, rates: list[float]) -> list[str]:
    """How to train with what was learned, and without Mechanic."""
    if not watched.is_linear:
        name = watched.cls.__name__
        return [f"  The steps of {name} may not be proportional to its lr, so keep training with Mechanic."]
    if any(_sets_own_rate(watched, index) for index in range(len(rates))):
        shown = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))
        return [f"  Your script sets the learning rate itself. To train without Mechanic, let its peak be {shown}."]
    options = [f"{name}={text}" for name, text in watched.call.items()]
    if len(set(rates)) == 1:
        head = [f"params, lr={rates[0]:.3g}"]
    else:
        head = ["[" + ", ".join(f'{{"params": ..., "lr": {rate:.3g}}}' for rate in rates) + "]"]
    prefix = "torch.optim." if watched.cls is getattr(torch.optim, watched.cls.__name__, None) else ""
    lines = [
        "  To train without Mechanic, keep everything else and write:",
        f"    {prefix}{watched.cls.__name__}({', '.join(head + options)})",
    ]
    if watched.is_rising():
        lines.append("  It was still rising when the run ended. A longer one may find a larger rate.")
    if any("max_lr" in group for group in watched.groups):
        peaks = f"{rates[0]:.3g}" if len(set(rates)) == 1 else "[" + ", ".join(f"{rate:.3g}" for rate in rates) + "]"
        lines.append(f"  Your scheduler sets the peak itself: give it max_lr={peaks}.")
    return lines


def _peak_of(watched: Watched, index: int) -> Any:
    """The learning rate that the script passed for a group, or the largest that it set: the peak of its schedule."""
    group = watched.groups[index]
    if _sets_own_rate(watched, index):
        return watched.largest_lrs[index]
    return group.get("max_lr", group.get("initial_lr", _built_lr(watched, index)))


def _built_lr(watched: Watched, index: int) -> Any:
    return watched.built_lrs[index] if index < len(watched.built_lrs) else watched.groups[index].get("lr")


def _sets_own_rate(watched: Watched, index: int) -> bool:
    """Whether the script writes learning rates that it did not build the optimizer with, without a scheduler."""
    has_scheduler = any(key in watched.groups[index] for key in ("max_lr", "initial_lr"))
    largest = watched.largest_lrs[index] if index < len(watched.largest_lrs) else None
    return not has_scheduler and largest is not None and largest != _built_lr(watched, index)


def _peak_rate(group: Group, peak: Any) -> float:
    """What ``release()`` would leave in the group, at the peak of the schedule."""
    learned = learned_rate_of(group)
    return learned if peak is None else learned * float(peak) / float(group[PEAK_LR])


def _passed(watched: Watched, index: int) -> str:
    lr = _peak_of(watched, index)
    shown = "none" if lr is None else f"{float(lr):g}"
    return f"the largest that you set was {shown}" if _sets_own_rate(watched, index) else f"you passed {shown}"
