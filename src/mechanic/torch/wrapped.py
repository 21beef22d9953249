"""A base optimizer, the options it was wrapped with, and what Mechanic remembers between steps."""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.config import TunerConfig
from mechanic.torch import layout
from mechanic.torch.layout import DELTA, FORMAT, FROZEN, OWN_ITERATES, PEAK_LR, ROW, SKIPPED, TUNER, Group, params_of
from mechanic.torch.lists import is_on_host
from mechanic.torch.private import foreach_copy_, run_hooks
from mechanic.torch.shards import Reduction, SharedGroup, refuse_parts_of_matrices
from mechanic.torch.together import members_of, names_by_group, options_of, owners_of
from mechanic.tuner import TunerState, is_at_bound, is_dominated

BaseT = TypeVar("BaseT", bound=Optimizer)


@dataclass(eq=False)
class Wrapped(Generic[BaseT]):
    """All that :class:`mechanic.torch.Mechanic` works with; the options are documented there."""

    base: BaseT
    config: TunerConfig
    peak_lr: float | None
    per_group: bool
    skip_nonfinite: bool
    own_iterates: bool
    process_group: Any  # that of the user, or a SharedGroup
    delta: torch.dtype | str | None  # what Delta is stored in; None is the working dtype
    peak_is_settled: bool = False  # the first step has been made, so the peak of the schedule is known
    observed: dict[int, Tensor] | None = None  # this rank's sums for the next step, [5] by row of the tuner
    resumed: dict[int, tuple[float, float]] = field(default_factory=dict)  # by row, see note_resume

    # Everything below is made anew in a copy and when unpickled.
    elements: int = field(default=0, init=False)  # of the parameters that the optimizer was built with
    told: set[str] = field(default_factory=set, init=False)  # the topics of the warnings so far
    idle_steps: float = field(default=0, init=False)  # at the start, without any gradient; minus infinity after it
    known: dict[weakref.ref[Tensor], int] = field(default_factory=dict, init=False)  # of parameters that have stepped
    checked: list[int] = field(default_factory=list, init=False)  # identities of the parameters that stepped last
    _reduction: Reduction | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.process_group = SharedGroup.of(self.process_group)
        self.elements = sum(p.numel() for p in self.params)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)

    @property
    def groups(self) -> list[Group]:
        return self.base.param_groups

    @property
    def params(self) -> Iterable[Tensor]:
        return params_of(self.groups)

    @property
    def is_frozen(self) -> bool:
        return FROZEN in self.groups[0]

    @property
    def skipped_steps(self) -> int:
        return int(self.groups[0].get(SKIPPED, 0))

    # Param groups and tuners.

    def require_assigned_groups(self) -> None:
        """Raise if this Mechanic has been released. Assign tuners to groups that were added to the base directly."""
        assigned = [TUNER in group for group in self.groups]
        if not any(assigned):
            raise RuntimeError("this Mechanic has been released; use the optimizer that release() returned")
        if not all(assigned):
            self.assign_tuners()

    def by_tuner(self) -> dict[str, list[Group]]:
        """The groups that share a tuner, by the name that users see. All else tells tuners apart by their row."""
        sharing: dict[str, list[Group]] = {}
        for index, group in enumerate(self.groups):
            unnamed = f"group {index}" if self.per_group else "default"
            name = unnamed if group.get("tuner") is None else str(group["tuner"])
            sharing.setdefault(name, []).append(group)
        return sharing

    def assign_tuners(self) -> None:
        """Give new groups their tuner: that of the groups they share one with, or a new one.

        Everything is checked before the first group is changed.
        """
        if len(params := list(self.params)) != len({id(p) for p in params}):
            raise ValueError("a parameter is in the optimizer more than once, and would be scaled more than once")
        names, skipped = names_by_group(self.base), self.skipped_steps
        rows = [group[ROW] for group in self.groups if TUNER in group]
        # Not the row of a tuner that is gone, of which something may still be remembered.
        next_row = 1 + max([*rows, *self.known.values(), *(self.observed or ()), *self.resumed], default=-1)
        added: list[tuple[Group, Group]] = []
        for name, sharing in self.by_tuner().items():
            if self.per_group and len({group.get("tuner") is None for group in sharing}) > 1:
                raise ValueError(f"a group names the tuner {name!r}, which is what per_group=True calls that of {name}")
            known = [group for group in sharing if TUNER in group]
            if known:
                entries = {key: known[0][key] for key in (ROW, PEAK_LR, FROZEN, TUNER) if key in known[0]}
            elif self.is_frozen:
                raise ValueError(f"the scales are frozen, and tuner {name!r} has none yet; name one of the others")
            else:
                entries = {ROW: next_row, PEAK_LR: self.peak_lr or layout.peak_lr_of(sharing)}
                entries[TUNER] = layout.new_tuner(self.config.betas)
                next_row += 1
            added += [(group, entries) for group in sharing if TUNER not in group]
        for group, entries in added:
            group.update(entries, **{TUNER: entries[TUNER].clone()})
        for group, name in zip(self.groups, names, strict=True):
            group.update({"mechanic_format": FORMAT, "mechanic_base": name, SKIPPED: skipped})
            if self.own_iterates:
                group[OWN_ITERATES] = 1
        layout.remember_rates([group for group, _ in added])  # torch loads into the keys that a new optimizer has
        self.show_scales()

    def remember(self, learned: tuple[Tensor, TunerState] | None, held: list[Group] | None = None) -> None:
        """Write down what a step has learned, and warn of what can be seen without waiting for a device.

        ``learned`` is the betas and the tuners; None if S is frozen. ``held`` is what the groups held before the step.
        """
        layout.remember_rates(self.groups, held)
        if learned is None:
            return
        betas, tuned = learned
        # In one operation, so that groups that share a tuner never differ in it.
        foreach_copy_([group[TUNER] for group in self.groups], layout.as_rows(self.groups, betas, tuned))
        self.show_scales()
        if is_on_host(betas):
            self.warn_of(tuned)

    def show_scales(self) -> None:
        """Keep ``d`` = S / peak_lr in every group: many trainers log ``d * lr``, which is then the effective rate."""
        if "d" not in options_of(self.base):  # Adafactor has an option of this name
            for group in self.groups:
                group["d"] = layout.scale_of(group) / group[PEAK_LR]

    def scales(self) -> dict[str, float]:
        self.require_assigned_groups()
        self.warn_of(layout.read_on_host(self.groups))
        return {name: float(layout.scale_of(sharing[0])) for name, sharing in self.by_tuner().items()}

    def learned_rates(self) -> dict[str, float]:
        self.require_assigned_groups()
        return {name: layout.learned_rate_of(sharing[0]) for name, sharing in self.by_tuner().items()}

    def freeze(self) -> None:
        if self.own_iterates:
            raise TypeError(
                f"{type(self.base).__name__} steps on iterates of its own, which are not scaled, so it cannot go on "
                "without Delta; keep tuning"
            )
        rates = self.learned_rates()
        if not all(rate > 0 for rate in rates.values()):
            raise ValueError(
                f"nothing has been learned yet, the scales are {rates}; take some steps first, and give the optimizer "
                "no group or layer of which nothing is trained"
            )
        layout.freeze_scales(self.groups)
        self.show_scales()
        self.observed = None
        self.drop(DELTA)  # and DELTA_SCALES

    def drop(self, prefix: str) -> None:
        """Remove entries whose names begin so from the state of parameters; what was handed out of it keeps them."""
        state = self.base.state
        for p in self.params:
            if p in state:
                state[p] = {key: value for key, value in state[p].items() if not key.startswith(prefix)}

    # The learning rate that counts as 1.

    def settle_peak_lr(self) -> None:
        """Before the first step, look for a ``OneCycleLR``, which brings a peak of its own."""
        if self.resumed:
            self._compare_with_resumed_rates()
        if self.peak_is_settled or self.peak_lr is not None:
            return
        for sharing in self.by_tuner().values():
            peak_lr, start = sharing[0][PEAK_LR], layout.largest(sharing, "initial_lr", 0.0)
            if peak_of_cycle := layout.largest(sharing, "max_lr", 0.0):
                layout.rebase(sharing, peak_of_cycle)
            elif start and start != peak_lr:  # CyclicLR ignores that of the base
                self.warn_once(
                    "peak",
                    f"a scheduler starts from a learning rate of {start:g}, not from the {peak_lr:g} that the base was "
                    "built with and that counts as 1; pass the peak of the schedule, Mechanic(base, peak_lr=...)",
                )
        # A step with lr = 0 moves nothing: torch.distributed.checkpoint makes one before it loads.
        self.peak_is_settled = not all(group.get("lr") == 0.0 for group in self.groups)

    def note_resume(self, former: list[Group]) -> None:
        """Remember the peak that this script has, and the rate of the checkpoint, of tuners whose peaks differ.

        The checkpoint brings the peak and the rates. A scheduler that is not restored from it goes on with rates of
        this script, as if they had the checkpoint's peak.
        """
        peaks = {group[ROW]: before[PEAK_LR] for group, before in zip(self.groups, former, strict=True)}
        self.resumed = {
            sharing[0][ROW]: (peaks[sharing[0][ROW]], layout.largest(sharing, "lr", 1.0))
            for sharing in self.by_tuner().values()
            if not math.isclose(peaks[sharing[0][ROW]], sharing[0][PEAK_LR], rel_tol=1e-6)
        }

    def _compare_with_resumed_rates(self) -> None:
        """After a resume with another lr: find out from the first change of the rate whose units it has."""
        for sharing in self.by_tuner().values():
            row, peak, lr = sharing[0][ROW], sharing[0][PEAK_LR], layout.largest(sharing, "lr", 1.0)
            peak_here, lr_saved = self.resumed.get(row, (peak, lr))
            if lr <= 0 or lr == lr_saved:
                continue
            del self.resumed[row]
            if lr_saved and abs(math.log(lr / lr_saved * peak / peak_here)) < abs(math.log(lr / lr_saved)):
                layout.rebase(sharing, layout.largest(sharing, "max_lr", peak_here))  # nearer in this script's units
            elif lr > peak * (1 + 1e-6):
                self.warn_once(
                    "resumed",
                    f"the learning rate has risen to {lr:g}, and the peak in the loaded checkpoint is {peak:g}. If the "
                    f"scheduler was not restored from the checkpoint, build the base optimizer with lr={peak:g}",
                )

    # Parameters.

    def reduction(self) -> Reduction:
        if self._reduction is None or not self._reduction.knows(self.params):
            for owner, group in zip(owners_of(self.base), self.groups, strict=True):
                if any("Muon" in cls.__name__ for cls in type(owner).__mro__) and group.get("use_muon", True):
                    refuse_parts_of_matrices(type(owner).__name__, [p for p in group["params"] if p.requires_grad])
            self._reduction = Reduction(self.params, self.process_group.group, self.elements)
        return self._reduction

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        return self.reduction().sum(sums, list(self.by_tuner()))

    def check_parameters(self) -> None:
        """Raise if a parameter that was moved is in no group now: one S scales all that a tuner has moved."""
        params = list(self.params)
        if (identities := [id(p) for p in params]) == self.checked:
            return
        stepping, present = {group[ROW] for group in self.groups}, set(params)
        for known, row in self.known.items():
            p = known()
            if p is not None and row in stepping and p not in present and DELTA in self.base.state.get(p, ()):
                raise RuntimeError(
                    "parameters that Mechanic has moved are in no param group now. DeepSpeed's ZeRO steps its "
                    "optimizer group by group, and a tuner needs all its gradients in one step: put all parameters "
                    "into one param group, tune the groups apart, Mechanic(base, per_group=True), or use fully_shard. "
                    "If they were removed for good, delete their optimizer.state"
                )
        self.known = {known: row for known, row in self.known.items() if known() is not None}
        self.known.update((weakref.ref(p), group[ROW]) for group in self.groups for p in group["params"])
        self.checked = identities

    def run_hooks(self, *, after: bool) -> None:
        """Run the hooks on the base's step: once per step, whatever its parts."""
        run_hooks(dict.fromkeys((self.base, *members_of(self.base))), after=after)

    # Counts and warnings.

    def count_skipped_step(self) -> None:
        skipped = self.skipped_steps + 1
        for group in self.groups:
            group[SKIPPED] = skipped
        self.warn_of(layout.read_on_host(self.groups))

    def warn_once(self, topic: str, message: str) -> None:
        """Warn, with the line of the first caller outside of Mechanic and PyTorch."""
        if topic in self.told:
            return
        self.told.add(topic)
        frame, level = inspect.currentframe(), 1
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("mechanic", "torch"):
            frame, level = frame.f_back, level + 1
        warnings.warn(message, stacklevel=level)

    def warn_if_nothing_is_trained(self, moves: bool) -> None:
        """An optimizer that was built before fully_shard holds parameters that never get a gradient."""
        self.idle_steps = -math.inf if moves else self.idle_steps + 1
        if self.idle_steps == 10:
            self.warn_once(
                "no gradients",
                "no parameter of this optimizer has had a gradient in its first 10 steps. Build the optimizer "
                "after fully_shard, and after everything else that replaces the parameters of the model",
            )

    def warn_of(self, tuner: TunerState) -> None:
        """Warn of gradients that are NaN or far larger than all others, and of bounds. The tuner is on the host."""
        steps, nonfinite = int(tuner.steps.max()), int(tuner.nonfinite_steps.max()) + self.skipped_steps
        if nonfinite >= 10 and nonfinite > steps:
            self.warn_once(
                "nonfinite",
                f"{nonfinite} of {steps + nonfinite} steps so far had NaN or inf gradients, and nothing is learned "
                "from such steps. With a GradScaler, call scaler.step(optimizer), which unscales the gradients, not "
                "optimizer.step(); otherwise look for NaN in the loss",
            )
        if bool(is_dominated(tuner, self.config).any()):
            self.warn_once(
                "dominated",
                "the gradient of one step outweighs those of all others together, hundreds of times over, and S and "
                "the base's state recover slowly. Load a checkpoint from before it, and clip the gradients before "
                "step(): torch.nn.utils.clip_grad_norm_(parameters, max_norm=1.0)",
            )
        if self.config.has_bounds and bool(is_at_bound(tuner, self.config, torch).any()):
            self.warn_once(
                "bound",
                f"S is held by a bound, min_lr={self.config.min_lr:g} or max_lr={self.config.max_lr:g} of the config: "
                "Mechanic would have chosen another learning rate. Widen the bound, unless you meant it to hold",
            )
