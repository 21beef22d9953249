"""A base optimizer, the options it was wrapped with, and what Mechanic remembers between steps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.config import TunerConfig
from mechanic.torch import tuners
from mechanic.torch.layout import (
    DELTA,
    DELTA_SCALES,
    FROZEN,
    OWN_ITERATES,
    PEAK_LR,
    RESIDUAL,
    ROW,
    SKIPPED,
    Group,
    params_of,
    rows_of,
)
from mechanic.torch.lists import is_on_host
from mechanic.torch.private import run_hooks
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
    idle_steps: int = field(default=0, init=False)  # at the start, without any gradient
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
    def rows(self) -> Iterable[int]:
        """The rows of the tuners, in the order in which they are read."""
        return rows_of(self.groups)

    @property
    def is_frozen(self) -> bool:
        return FROZEN in self.groups[0]

    # Param groups and tuners.

    def require_assigned_groups(self) -> None:
        """Raise if this Mechanic has been released. Assign tuners to groups that were added to the base directly."""
        if not any(tuners.is_assigned(group) for group in self.groups):
            raise RuntimeError("this Mechanic has been released; use the optimizer that release() returned")
        if not all(tuners.is_assigned(group) for group in self.groups):
            self.assign_tuners()

    def assign_tuners(self) -> None:
        former_rows = [*self.known.values(), *(self.observed or ())]
        options: dict[str, Any] = {"per_group": self.per_group, "former_rows": former_rows}
        tuners.assign_tuners(self.groups, self.config, self.peak_lr, names_by_group(self.base), **options)
        if self.own_iterates:
            for group in self.groups:
                group[OWN_ITERATES] = 1
        self.show_scales()

    def by_tuner(self) -> dict[str, list[Group]]:
        """The groups that share a tuner, by its name."""
        self.require_assigned_groups()
        return tuners.by_tuner(self.groups, per_group=self.per_group)

    def remember(self, betas: Tensor, tuned: TunerState, finite: Tensor, held: list[Group] | None = None) -> None:
        """Write down what a step has learned, and warn of what can be seen without waiting for a device."""
        tuners.write_tuners(self.groups, betas, tuned)
        self.remember_rates(held)
        self.show_scales()
        if is_on_host(finite):
            self.warn_of_scale(tuned)
            if not finite.all():
                self.warn_if_nothing_is_learned()

    def remember_rates(self, held: list[Group] | None = None) -> None:
        tuners.remember_rates(self.groups, held)

    @property
    def shows_scales(self) -> bool:
        return "d" not in options_of(self.base)  # Adafactor has an option of this name

    def show_scales(self) -> None:
        if self.shows_scales:
            tuners.show_scales(self.groups)

    def scales(self) -> dict[str, float]:
        scales = {name: float(tuners.scale_of(sharing[0])) for name, sharing in self.by_tuner().items()}
        if not all(scales.values()):
            self.warn_if_nothing_is_learned()
        self.warn_of_scale(tuners.read_on_host(self.groups))
        return scales

    def learning_rates(self) -> dict[str, float]:
        scales = self.scales()
        return {name: scales[name] * max(map(tuners.last_rate, groups)) for name, groups in self.by_tuner().items()}

    # The learning rate that counts as 1.

    def settle_peak_lr(self) -> None:
        """Before the first step, look for a ``OneCycleLR``, which brings a peak of its own."""
        if self.resumed:
            self._compare_with_resumed_rates()
        if self.peak_is_settled:
            return
        for sharing in self.by_tuner().values():
            peak_lr, start = sharing[0][PEAK_LR], max(float(group.get("initial_lr", 0.0)) for group in sharing)
            if tuners.one_cycle_peak(sharing):
                tuners.rebase(sharing, tuners.peak_lr_of(sharing))
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
        before = {id(group): float(held.get(PEAK_LR, 0.0)) for group, held in zip(self.groups, former, strict=True)}
        leaders = [sharing[0] for sharing in self.by_tuner().values()]
        self.resumed = {
            group[ROW]: (before[id(group)], tuners.largest_lr(sharing))
            for group, sharing in zip(leaders, self.by_tuner().values(), strict=True)
            if not math.isclose(before[id(group)], group[PEAK_LR], rel_tol=1e-6)
        }

    def _compare_with_resumed_rates(self) -> None:
        """After a resume with another lr: find out from the first change of the rate whose units it has."""
        for sharing in self.by_tuner().values():
            row, peak, lr = sharing[0][ROW], float(sharing[0][PEAK_LR]), tuners.largest_lr(sharing)
            peak_here, lr_saved = self.resumed.get(row, (0.0, 0.0))  # the latter is 0 once the former course goes on
            if not peak_here or lr <= 0 or lr == lr_saved:
                continue
            if lr_saved and abs(math.log(lr / lr_saved * peak / peak_here)) < abs(math.log(lr / lr_saved)):
                tuners.rebase(sharing, tuners.one_cycle_peak(sharing) or peak_here)  # nearer in units of this script
                del self.resumed[row]
            elif lr > peak * (1 + 1e-6):
                self.warn_once(
                    "resumed",
                    f"the learning rate has risen to {lr:g}, and the peak in the loaded checkpoint is {peak:g}. If the "
                    f"scheduler was not restored from the checkpoint, build the base optimizer with lr={peak:g}",
                )
            else:
                self.resumed[row] = peak_here, 0.0

    # Keep what was learned: stop tuning, or hand over to the base alone.

    def freeze(self) -> None:
        """Keep S as it is and drop Delta."""
        if self.own_iterates:
            raise TypeError(
                f"{type(self.base).__name__} steps on iterates of its own, which are not scaled, so it cannot go on "
                "without Delta; keep tuning"
            )
        scales = self.scales()
        if not all(scale > 0 for scale in scales.values()):
            raise ValueError(
                f"nothing has been learned yet, the scales are {scales}; take some steps first, and give the optimizer "
                "no group or layer of which nothing is trained"
            )
        for name, sharing in self.by_tuner().items():
            for group in sharing:
                group[FROZEN] = scales[name]
        self.observed = None
        self._drop(DELTA, DELTA_SCALES)

    def release(self) -> BaseT:
        """Multiply the base's learning rates by S, and remove everything of Mechanic's from it."""
        if not self.is_frozen:
            self.freeze()
        for group in self.groups:
            factor = group[FROZEN] / group[PEAK_LR]
            for key in ("lr", "initial_lr", "max_lr", "min_lr"):
                if group.get(key) is not None:
                    group[key] = group[key] * factor
        tuners.remove_tuners(self.groups)
        self._drop(RESIDUAL)
        self.base.load_state_dict(self.base.state_dict())  # casts the moments to the parameters' dtype
        return self.base

    def _drop(self, *names: str) -> None:
        """Remove entries from the state of the parameters; what was handed out of it keeps them."""
        state = self.base.state
        for p in self.params:
            if p in state:
                state[p] = {key: value for key, value in state[p].items() if key not in names}

    # Parameters.

    def reduction(self) -> Reduction:
        if self._reduction is None or not self._reduction.knows(self.params):
            for owner, group in zip(owners_of(self.base), self.groups, strict=True):
                if any("Muon" in cls.__name__ for cls in type(owner).__mro__) and group.get("use_muon", True):
                    refuse_parts_of_matrices(type(owner).__name__, [p for p in group["params"] if p.requires_grad])
            self._reduction = Reduction(self.params, self.process_group.group, self.elements)
        return self._reduction

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        names = {group[ROW]: name for name, sharing in self.by_tuner().items() for group in sharing}
        return self.reduction().sum(sums, [names[row] for row in self.rows])

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

    @property
    def skipped_steps(self) -> int:
        return int(self.groups[0].get(SKIPPED, 0))

    def nonfinite_steps(self) -> int:
        self.require_assigned_groups()
        return tuners.step_counts(self.groups)[1] + self.skipped_steps

    def count_skipped_step(self) -> None:
        skipped = self.skipped_steps + 1
        for group in self.groups:
            group[SKIPPED] = skipped
        self.warn_if_nothing_is_learned()

    def warn_once(self, topic: str, message: str) -> None:
        if topic not in self.told:
            self.told.add(topic)
            tuners.warn_user(message)

    def warn_if_nothing_is_trained(self, moves: bool) -> None:
        """An optimizer that was built before fully_shard holds parameters that never get a gradient."""
        if self.idle_steps >= 0:
            self.idle_steps = -1 if moves else self.idle_steps + 1
            if self.idle_steps == 10:
                self.warn_once(
                    "no gradients",
                    "no parameter of this optimizer has had a gradient in its first 10 steps. Build the optimizer "
                    "after fully_shard, and after everything else that replaces the parameters of the model",
                )

    def warn_if_nothing_is_learned(self) -> None:
        """Warn if most gradients were NaN or infinite."""
        steps, nonfinite = tuners.step_counts(self.groups)
        nonfinite += self.skipped_steps
        if nonfinite >= 10 and nonfinite > steps:
            self.warn_once(
                "nonfinite",
                f"{nonfinite} of {steps + nonfinite} steps so far had NaN or inf gradients, and nothing is learned "
                "from such steps. With a GradScaler, call scaler.step(optimizer), which unscales the gradients, not "
                "optimizer.step(); otherwise look for NaN in the loss",
            )

    def warn_of_scale(self, tuner: TunerState) -> None:
        """Warn of one gradient far larger than all others, and of an S at a bound. The tuner is on the host."""
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
