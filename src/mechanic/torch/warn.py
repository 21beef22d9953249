"""Warnings that point at the user's line."""

from __future__ import annotations

import inspect
import warnings


def warn_user(message: str) -> None:
    """Warn, with the line of the first caller outside of Mechanic and PyTorch."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("mechanic", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class WarnOnce:
    """The warnings of one optimizer, each given once."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def nothing_is_learned(self, steps: int, nonfinite: int) -> None:
        self._warn(
            "nonfinite",
            f"the gradients of {nonfinite} steps so far were not finite, and of {steps} they were: Mechanic learns "
            "nothing from such steps. Is the loss scaled? Call scaler.step(optimizer), which unscales the "
            "gradients, not optimizer.step(); else look for NaN in the loss",
        )

    def step_is_missing(self) -> None:
        self._warn(
            "missing step",
            "the gradients of a whole backward pass have come, and step() was not called before zero_grad(): Mechanic "
            "learns nothing from such a pass. With step_in_backward(), too, call step() after backward()",
        )

    def one_step_dominates(self) -> None:
        self._warn(
            "dominated",
            "the gradient of one step outweighs those of all others together, hundreds of times over, and S and "
            "the base's state recover slowly. Load a checkpoint from before it, and clip the gradients before step(): "
            "torch.nn.utils.clip_grad_norm_(parameters, max_norm=1.0)",
        )

    def scale_at_bound(self, min_lr: float, max_lr: float) -> None:
        self._warn(
            "bound",
            f"S is held by a bound, min_lr={min_lr:g} or max_lr={max_lr:g} of the config: Mechanic would have chosen "
            "another learning rate. Widen the bound, unless you meant it to hold",
        )

    def another_peak(self, start: float, peak_lr: float) -> None:
        self._warn(
            "peak",
            f"a scheduler starts from a learning rate of {start:g}, not from the {peak_lr:g} that the base "
            "was built with and that counts as 1; pass the peak of the schedule, Mechanic(base, peak_lr=...)",
        )

    def _warn(self, topic: str, message: str) -> None:
        if topic not in self._topics:
            self._topics.add(topic)
            warn_user(message)
