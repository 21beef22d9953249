"""A base optimizer, the options it was wrapped with, and what Mechanic remembers between steps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.config import TunerConfig
from mechanic.torch import tuners
from mechanic.torch.base import DirectStepCheck, refuse_parts_of_matrices
from mechanic.torch.buckets import Bucket, Options, buckets_of
from mechanic.torch.delta import dtype_of_delta, mechanic_state
from mechanic.torch.layout import DELTA, FROZEN, OWN_ITERATES, PEAK_LR, ROW, SKIPPED, Group, params_of
from mechanic.torch.lists import is_on_host
from mechanic.torch.shards import Reduction, SharedGroup
from mechanic.torch.together import names_by_group, options_of
from mechanic.tuner import SUMS, TunerState, is_at_bound, is_dominated

BaseT = TypeVar("BaseT", bound=Optimizer)


class Resumed(NamedTuple):
    """Of a tuner that was loaded by a script with another learning rate."""

    peak: float  # of the learning rate in this script
    lr: float  # in the checkpoint; 0 once the rate has changed and was found to go on from there
    cycle: float  # the peak of a OneCycleLR in the checkpoint, or 0

    def fits(self, lr: float, peak: float) -> bool:
        """Whether the rate of the checkpoint, brought to the peak of this script, is nearer to a rate than as it is."""
        return self.lr > 0 and abs(math.log(lr / self.lr * peak / self.peak)) < abs(math.log(lr / self.lr))


@dataclass(eq=False)
class Wrapped(Generic[BaseT]):
    """All that :class:`mechanic.torch.Mechanic` works with; the options are documented there."""

    base: BaseT
    config: TunerConfig
    peak_lr: float | None
    per_group: bool
    skip_nonfinite: bool
    own_iterates: bool
    process_group: SharedGroup
    delta: torch.dtype | str | None  # what Delta is stored in; None is the working dtype
    peak_is_settled: bool = False  # the first step has been made, so the peak of the schedule is known
    observed: dict[int, Tensor] | None = None  # this rank's sums for the next step, [5] by row of the tuner
    resumed: dict[int, Resumed] = field(default_factory=dict)  # by row, see note_resume

    # Everything below is made anew in a copy and when unpickled.
    elements: int = field(default=0, init=False)  # of the parameters that the optimizer was built with
    warn_once: tuners.WarnOnce = field(default_factory=tuners.WarnOnce, init=False)
    idle_steps: int = field(default=0, init=False)  # at the start, without any gradient
    _rows: dict[weakref.ref[Tensor], int] = field(default_factory=dict, init=False)  # of parameters that have stepped
    _checked: list[int] = field(default_factory=list, init=False)  # identities of the parameters that stepped last
    _reduction: Reduction | None = field(default=None, init=False)
    _direct_steps: DirectStepCheck | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.elements = sum(p.numel() for p in params_of(self.groups))
        if tuners.is_assigned(self.groups[0]):  # in a copy; a new one checks everything first
            self.watch_direct_steps()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)

    @property
    def groups(self) -> list[Group]:
        return self.base.param_groups

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
        former_rows = [*self._rows.values(), *(self.observed or ())]
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

    def read_tuners(self, buckets: list[Bucket]) -> tuple[Tensor, TunerState]:
        """The betas and the state of all tuners, each [tuners, n], where the parameters are."""
        return tuners.read_tuners(self.groups, buckets[0].device if buckets else None)

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
            if any("max_lr" in group for group in self.groups):
                peak_lr = tuners.peak_lr_of(sharing)
                for group in sharing:
                    group[PEAK_LR] = peak_lr
            self._warn_of_another_peak(sharing)
        # A step with lr = 0 moves nothing: torch.distributed.checkpoint makes one before it loads.
        self.peak_is_settled = not all(group.get("lr") == 0.0 for group in self.groups)

    def note_resume(self, former: list[Group]) -> None:
        """Remember the peak that this script has, and the rate of the checkpoint, of tuners whose peaks differ.

        The checkpoint brings the peak and the rates. A scheduler that is not restored from it goes on with rates of
        this script, as if they had the checkpoint's peak.
        """
        self.resumed = {
            group[ROW]: Resumed(float(before[PEAK_LR]), tuners.largest_lr(sharing), tuners.one_cycle_peak(sharing))
            for sharing in tuners.by_tuner(self.groups, per_group=self.per_group).values()
            for group, before in zip(self.groups, former, strict=True)
            if group is sharing[0] and not math.isclose(before.get(PEAK_LR, 0.0), group[PEAK_LR], rel_tol=1e-6)
        }

    def _compare_with_resumed_rates(self) -> None:
        """After a resume with another lr: find out from the first change of the rate whose units it has."""
        for sharing in self.by_tuner().values():
            row, peak, lr = sharing[0][ROW], float(sharing[0][PEAK_LR]), tuners.largest_lr(sharing)
            cycle = tuners.one_cycle_peak(sharing)
            if (known := self.resumed.get(row)) is None or lr <= 0 or (lr, cycle) == (known.lr, known.cycle):
                continue
            if cycle != known.cycle or known.fits(lr, peak):
                tuners.rebase(sharing, cycle or known.peak)
                del self.resumed[row]
            elif lr > peak * (1 + 1e-6):
                self.warn_once.rate_above_peak(lr, peak)
            else:
                self.resumed[row] = known._replace(lr=0.0)  # the scheduler was restored, or its further course can tell

    def _warn_of_another_peak(self, sharing: list[Group]) -> None:
        """CyclicLR, for example, ignores the learning rate that the base was built with."""
        starts = [float(group["initial_lr"]) for group in sharing if "initial_lr" in group]
        peak_lr = sharing[0][PEAK_LR]
        if starts and max(starts) != peak_lr and not any("max_lr" in group for group in sharing):
            self.warn_once.another_peak(max(starts), peak_lr)

    # Parameters.

    def buckets(self, params: Collection[Tensor] | None = None, held: list[Group] | None = None) -> list[Bucket]:
        """The parameters that are trained in lists, or some of them. ``held`` is what the groups held before."""
        options = Options(self.delta, self.own_iterates, self.is_frozen)
        return buckets_of(self.base, self.reduction(), options, params, held)

    def reduction(self) -> Reduction:
        if self._reduction is None or not self._reduction.knows(params_of(self.groups)):
            refuse_parts_of_matrices(self.base)
            self._reduction = Reduction(params_of(self.groups), self.process_group.group, self.elements)
        return self._reduction

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        names = {group[ROW]: name for name, sharing in self.by_tuner().items() for group in sharing}
        return self.reduction().sum(sums, [names[row] for row in tuners.rows_of(self.groups)])

    def check_parameters(self) -> None:
        """Raise if a parameter that was moved is in no group now: one S scales all that a tuner has moved."""
        params = list(params_of(self.groups))
        if (identities := [id(p) for p in params]) == self._checked:
            return
        stepping, present = {group[ROW] for group in self.groups}, set(params)
        for known, row in self._rows.items():
            p = known()
            if p is not None and row in stepping and p not in present and DELTA in self.base.state.get(p, ()):
                raise RuntimeError(
                    "parameters that Mechanic has moved are in no param group now. DeepSpeed's ZeRO steps its "
                    "optimizer group by group, and a tuner needs all its gradients in one step: put all parameters "
                    "into one param group, tune the groups apart, Mechanic(base, per_group=True), or use fully_shard. "
                    "If they were removed for good, delete their optimizer.state"
                )
        self._rows = {known: row for known, row in self._rows.items() if known() is not None}
        self._rows.update((weakref.ref(p), group[ROW]) for group in self.groups for p in group["params"])
        self._checked = identities

    def forget_parameters(self) -> None:
        """Others may be in the groups from now on."""
        self._rows, self._checked = {}, []

    def complete_state(self) -> None:
        """Put Delta beside all state that the base has, so that every checkpoint is complete.

        Adagrad has state before its first step. torch.distributed.checkpoint makes no step to fill in the rest then.
        """
        for p in params_of(self.groups):
            if state := self.base.state.get(p):
                self.keep(p, state)

    def keep(self, p: Tensor, entries: dict[str, Tensor]) -> None:
        """Put entries of Mechanic's beside the base's state of a parameter, in the dtypes that they are kept in."""
        delta = None if self.is_frozen else dtype_of_delta(p.dtype, self.delta)
        self.base.state[p].update(mechanic_state(p, entries, delta))

    def watch_direct_steps(self, *, watch: bool = True) -> None:
        """Warn if somebody calls the base's ``step`` directly; or stop watching."""
        if self._direct_steps:
            self._direct_steps.remove()
        self._direct_steps = DirectStepCheck(self.base) if watch else None

    # What was observed.

    def keep_observed(self, sums: Tensor) -> None:
        """Keep the sums of this rank, [tuners, 5], for the next step."""
        self.observed = {row: sums[index] for row, index in tuners.rows_of(self.groups).items()}

    def take_observed(self, like: Tensor) -> Tensor | None:
        """What was kept, [tuners, 5], with the dtype and device of ``like``; None if nothing was.

        A tuner that has been added since was not observed: its sums are 0, a step without feedback.
        """
        observed, self.observed = self.observed, None
        if observed is None:
            return None
        none = like.new_zeros(len(SUMS))
        return torch.stack([observed.get(row, none).to(none) for row in tuners.rows_of(self.groups)])

    # Counts and warnings.

    @property
    def skipped_steps(self) -> int:
        return int(self.groups[0].get(SKIPPED, 0))

    def count_skipped_step(self) -> None:
        skipped = self.skipped_steps + 1
        for group in self.groups:
            group[SKIPPED] = skipped
        self.warn_if_nothing_is_learned()

    def warn_if_nothing_is_trained(self, buckets: list[Bucket]) -> None:
        """An optimizer that was built before fully_shard holds parameters that never get a gradient."""
        if self.idle_steps >= 0:
            self.idle_steps = -1 if any(bucket.moves for bucket in buckets) else self.idle_steps + 1
            if self.idle_steps == 10:
                self.warn_once.nothing_is_trained()

    def warn_if_nothing_is_learned(self, finite: Tensor | None = None) -> None:
        """Warn if most gradients were NaN or infinite; with flags of this step, only if they show some on the host."""
        if finite is not None and (not is_on_host(finite) or bool(finite.all())):
            return
        steps, nonfinite = tuners.step_counts(self.groups)
        nonfinite += self.skipped_steps
        if nonfinite >= 10 and nonfinite > steps:
            self.warn_once.nothing_is_learned(steps, nonfinite)

    def warn_of_scale(self, tuner: TunerState) -> None:
        """Warn of one gradient far larger than all others, and of an S at a bound; never waits for a device."""
        if not is_on_host(tuner.steps):
            return
        if bool(is_dominated(tuner, self.config).any()):
            self.warn_once.one_step_dominates()
        if self.config.has_bounds and bool(is_at_bound(tuner, self.config, torch).any()):
            self.warn_once.scale_at_bound(self.config.min_lr, self.config.max_lr)
