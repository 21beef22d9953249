"""A base optimizer, the options it was wrapped with, and what Mechanic remembers between steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.config import TunerConfig
from mechanic.torch import tuners
from mechanic.torch.base_step import step_base
from mechanic.torch.bases import DirectStepCheck, ascends, decoupled_decays, knows_bfloat16, refuse_parts_of_matrices
from mechanic.torch.buckets import Bucket, widened
from mechanic.torch.grouping import buckets_of, mechanic_state_of
from mechanic.torch.kernels.eager import is_on_host
from mechanic.torch.kernels.rounding import is_half_precision
from mechanic.torch.layout import FROZEN, OWN_ITERATES, PEAK_LR, SKIPPED, Group, params_of
from mechanic.torch.shards import Reduction
from mechanic.torch.stored import is_stored
from mechanic.torch.together import names_by_group, options_of
from mechanic.torch.warn import WarnOnce
from mechanic.tuner import SUMS, TunerState, is_at_bound, is_dominated

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
    process_group: ProcessGroup | None
    peak_is_settled: bool = False  # the first step has been made, so the peak of the schedule is known
    observed: dict[int, Tensor] | None = None  # this rank's sums for the next step, [5] by row of the tuner
    delta: torch.dtype | str | None = None  # what Delta is stored in; None is the working dtype

    # Everything below is made anew in a copy and when unpickled.
    elements: int = field(default=0, init=False)  # of the parameters that the optimizer was built with
    is_linear_in_lr: bool | None = field(default=None, init=False)  # the base; None until it is needed
    missing: tuners.MissingParameterCheck = field(default_factory=tuners.MissingParameterCheck, init=False)
    warn_once: WarnOnce = field(default_factory=WarnOnce, init=False)
    table: object = field(default=None, init=False)  # of the kernels for GPUs
    _reduction: Reduction | None = field(default=None, init=False)
    _direct_steps: DirectStepCheck | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.elements = sum(p.numel() for p in params_of(self.groups))
        if tuners.is_assigned(self.groups[0]):  # in a copy; a new one checks everything first
            self.watch_direct_steps()

    def begin(self) -> None:
        """Give every group a tuner, once everything has been checked."""
        self.assign_tuners()
        try:
            if any(is_half_precision(p.dtype) for p in params_of(self.groups) if p in self.base.state):
                with self.as_it_steps():
                    self.base.load_state_dict(self.base.state_dict())  # casts state to what the base will step on
        except Exception:
            tuners.remove_tuners(self.groups)
            raise
        self.complete_state()
        self.watch_direct_steps()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)

    @property
    def groups(self) -> list[Group]:
        return self.base.param_groups

    @property
    def is_frozen(self) -> bool:
        return FROZEN in self.groups[0]

    def dtypes(self) -> set[torch.dtype]:
        """Of the parameters that are trained."""
        return {p.dtype for p in params_of(self.groups) if p.requires_grad}

    # Param groups and tuners.

    def require_assigned_groups(self) -> None:
        """Raise if this Mechanic has been released. Assign tuners to groups that were added to the base directly."""
        if not any(tuners.is_assigned(group) for group in self.groups):
            raise RuntimeError("this Mechanic has been released; use the optimizer that release() returned")
        if not all(tuners.is_assigned(group) for group in self.groups):
            self.assign_tuners()

    def assign_tuners(self) -> None:
        former_rows = [*self.missing.rows(), *(self.observed or ())]
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

    def settle_peak_lr(self) -> None:
        """Before the first step, look for a ``OneCycleLR``, which brings a peak of its own."""
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

    # Parameters.

    def reduction_and_buckets(self, decays: list[float] | None = None) -> tuple[Reduction, list[Bucket]]:
        """The sum over ranks, and the parameters in lists. ``decays`` are given if the base is to step on Delta."""
        reduction = self.reduction()
        buckets = buckets_of(
            self.groups,
            self.base.state,
            reduction,
            frozen=self.is_frozen,
            ascends=ascends(self.base),
            own_iterates=self.own_iterates,
            decays=decays,
            delta=self.delta,
            in_own_dtype=self.is_in_own_dtype,
        )
        return reduction, buckets

    def reduction(self) -> Reduction:
        if self._reduction is None or not self._reduction.knows(params_of(self.groups)):
            refuse_parts_of_matrices(self.base)
            self._reduction = Reduction(params_of(self.groups), self.process_group, self.elements)
        return self._reduction

    def decays_beside_delta(self) -> list[float] | None:
        """Weight decay by group if the base is to step on Delta itself, see :func:`decoupled_decays`; else None."""
        dtypes = self.dtypes()
        # In half precision x cannot hold x_1 for the time of the base's step. It need not if Delta is stored.
        if self.own_iterates or any(is_half_precision(t) and not is_stored(t, self.delta) for t in dtypes):
            return None
        return decoupled_decays(self.base, also_at_zero=self.is_in_own_dtype and dtypes == {torch.bfloat16})

    @property
    def is_in_own_dtype(self) -> bool:
        """Whether the base sees bfloat16 parameters as such, and makes its state of them as it does by itself."""
        return not self.own_iterates and is_stored(torch.bfloat16, self.delta) and knows_bfloat16(self.base)

    def as_it_steps(self) -> AbstractContextManager[None]:
        """While the base loads state: show it parameters in the dtype that it steps on, which torch casts to."""
        return widened(self.base, but_for=torch.bfloat16 if self.is_in_own_dtype else None)

    def complete_state(self) -> None:
        """Put Delta beside all state that the base has, so that every checkpoint is complete.

        Adagrad has state before its first step. torch.distributed.checkpoint makes no step to fill in the rest then.
        """
        for p in params_of(self.groups):
            if state := self.base.state.get(p):
                self.keep(p, state)

    def keep(self, p: Tensor, entries: dict[str, Tensor]) -> None:
        """Put entries of Mechanic's beside the base's state of a parameter, in the dtypes that they are kept in."""
        self.base.state[p].update(mechanic_state_of(p, entries, frozen=self.is_frozen, delta=self.delta))

    # The base's own step.

    def step_base(
        self,
        buckets: list[Bucket],
        *,
        scale_lr: bool = False,
        instead: Callable[[], Any] | None = None,
        only_these: bool = False,
    ) -> list[list[Tensor]]:
        """See :func:`mechanic.torch.base_step.step_base`."""
        with self._direct_steps.expected() if self._direct_steps else nullcontext():
            return step_base(self.base, buckets, scale_lr=scale_lr, instead=instead, only_these=only_these)

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

    def _warn_of_another_peak(self, sharing: list[Group]) -> None:
        """CyclicLR, for example, ignores the learning rate that the base was built with."""
        starts = [float(group["initial_lr"]) for group in sharing if "initial_lr" in group]
        peak_lr = sharing[0][PEAK_LR]
        if starts and max(starts) != peak_lr and not any("max_lr" in group for group in sharing):
            self.warn_once.another_peak(max(starts), peak_lr)
