"""Mechanic, the wrapper: a torch optimizer around a torch optimizer."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch import checkpoint, compiled, groups, vectors
from mechanic.torch.alone import step_alone
from mechanic.torch.bases import DirectStepCheck, decays_of_blind, refuse_unsuitable
from mechanic.torch.buckets import Bucket, buckets_of, own_state, widened
from mechanic.torch.checkpoint import DELTA, RESIDUAL, StateDict
from mechanic.torch.groups import Group
from mechanic.torch.probe import expected_state, is_linear_in_lr
from mechanic.torch.shards import Reduction
from mechanic.torch.vectors import is_half_precision
from mechanic.tuner import SUMS, TunerConfig, TunerState, kept_share, total_scale, update

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

BaseT = TypeVar("BaseT", bound=Optimizer)

_OPTIONS = (
    "base",
    "config",
    "per_group",
    "skip_nonfinite",
    "own_iterates",
    "process_group",
    "compile",
    "_unit",
    "_unit_is_settled",
    "_observed",
)


class Mechanic(Optimizer, Generic[BaseT]):
    """Learn the size of another optimizer's steps while training.

    The base optimizer proposes updates u; their sum is Delta, and the parameters are kept at
    x_1 + S Delta, where S is learned from the gradients. The base's learning rate is a shape, not a
    size: what it was built with counts as 1, so only its course over time (a schedule) and its
    ratios between param groups matter.

    ``state``, ``param_groups`` and ``defaults`` are the base's own, so schedulers, gradient scalers and
    checkpoints see one optimizer. The tuner and Delta live in them; see :mod:`mechanic.torch.checkpoint`.

    Args:
        base: any optimizer that reads ``.grad`` and adds an update to the parameters.
        config: a :class:`mechanic.TunerConfig` or a dict of its fields.
        unit: the learning rate that counts as 1. Found by itself, also under ``OneCycleLR``; needed
            only where a scheduler ignores the learning rate the base was built with (``CyclicLR``).
        per_group: tune every param group apart. Without it, groups that name the same ``"tuner"``
            share one, and so do those that name none.
        skip_nonfinite: skip a step, the base's included, where a gradient is not finite, and count it in
            ``skipped_steps``. Reads one flag per step on the host. Without it such gradients are
            replaced by zeros, the tuner stays as it was, and the step never waits for the device.
        own_iterates: let the base step on iterates of its own, x_1 + Delta, and never see the parameters: for bases
            that keep several iterates (Schedule-Free, Lookahead), whose ``train()`` and ``eval()`` are passed through.
            Its weight decay then acts on those iterates, unscaled.
        process_group: the ranks to sum over where each holds plain tensors of its own (pipeline stages, FSDP1,
            ZeRO). DTensors (FSDP2, tensor parallel) and DDP need none.
        compile: compile the step: together with the base where that is torch's SGD, Adam or AdamW, else around it.
            Takes some seconds at the first step. Where something cannot be compiled, a warning says what and why.

    Example:
        >>> import torch
        >>> from mechanic.torch import Mechanic
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
        >>> for _ in range(3):
        ...     loss = model(torch.ones(8, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.scales()["default"] > 0
        True

    Reference: Cutkosky, Defazio, Mehta, "Mechanic: A Learning Rate Tuner", 2023.
    """

    base: BaseT
    config: TunerConfig
    per_group: bool
    skip_nonfinite: bool
    own_iterates: bool
    process_group: ProcessGroup | None
    compile: bool
    _observed: dict[int, Tensor] | None  # this rank's sums for the next step, [5] by row of the tuner
    _reduction: Reduction | None = None
    _elements: int = 0  # it was built on
    _presence: groups.Presence
    _warned: set[str]  # what has been warned of
    _direct_steps: DirectStepCheck | None = None
    _is_linear: bool | None = None  # in lr, the base; None until it is asked for
    _unit: float | None
    _unit_is_settled: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is Mechanic and (args or kwargs) and not isinstance(args[0] if args else kwargs.get("base"), Optimizer):
            refuse_unsuitable(args[0] if args else kwargs.get("base"))  # before Python refuses lr=1.0
        return super().__new__(cls)

    def __init__(
        self,
        base: BaseT,
        *,
        config: TunerConfig | Mapping[str, Any] | None = None,
        unit: float | None = None,
        per_group: bool = False,
        skip_nonfinite: bool = False,
        own_iterates: bool = False,
        process_group: ProcessGroup | None = None,
        compile: bool = False,  # noqa: A002
    ) -> None:
        refuse_unsuitable(base, own_iterates=own_iterates)
        if unit is not None and not 0 < unit < math.inf:
            raise ValueError(f"unit must be a positive learning rate, got {unit}")
        config = TunerConfig.of(config)
        if own_iterates:
            config = dataclasses.replace(config, forgetting=0.0)  # the base keeps points that could not follow
        options = base, config, per_group, skip_nonfinite, own_iterates, process_group, compile
        # Optimizer.__init__ would make groups of its own; __setstate__ makes only what hooks need.
        self.__setstate__(dict(zip(_OPTIONS, (*options, unit, unit is not None, None), strict=True)))
        self._enter_groups()
        try:
            if any(is_half_precision(p.dtype) for p in groups.params_of(self.param_groups) if p in self.state):
                with widened(groups.params_of(self.param_groups)):
                    base.load_state_dict(base.state_dict())  # casts what there is to what the base will step on
        except Exception:
            groups.leave(self.param_groups)
            raise
        self._elements = sum(p.numel() for p in groups.params_of(self.param_groups))
        self._complete_state()
        self._direct_steps = DirectStepCheck(base)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._warned = set()
        self._presence = groups.Presence()
        if groups.is_entered(self.param_groups[0]):  # not while __init__ is still checking, nor once released
            self._direct_steps = DirectStepCheck(self.base)

    # The base's own, looked up every time: load_state_dict rebinds them there, and frameworks write to them.

    @property
    def state(self) -> Any:
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    @property
    def param_groups(self) -> list[Group]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[Group]) -> None:
        self.base.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base.defaults = defaults

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Measure, tune, let the base step, and scale what it did."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_entered_groups()
        self._settle_units()
        if self.is_frozen:
            if self._step_frozen():
                groups.remember_rates(self.param_groups)
            return loss
        self._require_all_gradients()
        self._presence.check(self.param_groups, self.state)
        decays = self._decays_beside_delta()
        reduction, buckets = self._reduction_and_buckets(decays)
        if not buckets and reduction.group is None:
            return loss
        whole = self.compile and self._compiles_whole(buckets)

        # Measured before the base steps: it may edit gradients in place.
        betas, tuner = self._tuners(buckets[0].device if buckets else None)
        sums, grad_sq = self._measure(reduction, buckets, tuner)
        finite = grad_sq.isfinite()  # [tuners]
        if self.skip_nonfinite:
            if not finite.all():
                self._count_skipped_step()
                return loss
        elif not whole:
            for bucket in buckets:
                bucket.discard_grads_unless(finite)
        tuned = update(tuner, sums, betas, self.config, torch, groups.read_rates(self.param_groups, like=tuner.scales))
        scale, new_scale = total_scale(tuner, torch), total_scale(tuned, torch)  # S, S', [tuners]

        kept = kept_share(tuner, tuned, self.config, torch)
        if kept is not None and vectors.is_at_hand(kept) and bool((kept == 1).all()):
            kept = None
        for bucket in buckets:
            bucket.kept = kept
        if whole:
            delta_of = {p: own[DELTA] for b in buckets if b.has_grad for p, own in zip(b.params, b.own, strict=True)}
            compiled.step_whole(self.base, delta_of, scale, new_scale, kept, finite)
            for bucket in buckets:
                if not bucket.has_grad:
                    bucket.move([], scale, new_scale)
        else:
            self._step_base(buckets, scale, new_scale, decays)
        groups.write_tuners(self.param_groups, torch.stack([betas, *tuned], 1))
        groups.remember_rates(self.param_groups)
        self._show_scales()
        if vectors.is_at_hand(finite) and not finite.all():
            self._warn_if_nothing_is_learned()
        return loss

    def _step_base(self, buckets: list[Bucket], scale: Tensor, new_scale: Tensor, decays: list[float] | None) -> None:
        """Let the base step as a black box, and scale what it did."""
        self._set_leads(buckets, scale)
        if decays is not None:
            for bucket in buckets:
                bucket.lends_delta_at = scale
        for bucket, stepped in zip(buckets, self._let_base(buckets), strict=True):
            bucket.move(stepped, scale, new_scale)

    def _let_base(self, buckets: list[Bucket], **options: Any) -> list[list[Tensor]]:
        """See :func:`step_alone`."""
        with self._direct_steps.expected() if self._direct_steps else nullcontext():
            return step_alone(self.base, buckets, **options)

    def _compiles_whole(self, buckets: list[Bucket]) -> bool:
        """Whether base and Mechanic are to step as one kernel; else what can be is compiled around the base."""
        whole, left_out = compiled.choose_kernels(self.base, buckets, own_iterates=self.own_iterates)
        for message in left_out:
            self._warn_once(message, message)
        return whole

    def _set_leads(self, buckets: list[Bucket], scale: Tensor) -> None:
        if self.own_iterates:
            for bucket in buckets:
                bucket.lead = 1 - scale

    def _decays_beside_delta(self) -> list[float] | None:
        """By group, where the base is to step on Delta itself: see :func:`decays_of_blind`."""
        if self.is_frozen or self.own_iterates:
            return None
        if any(is_half_precision(dtype) for dtype in self._trainable_dtypes()):
            return None
        return decays_of_blind(self.base)

    def _trainable_dtypes(self) -> set[torch.dtype]:
        return {p.dtype for p in groups.params_of(self.param_groups) if p.requires_grad}

    def train(self) -> None:
        """Go to the base's training point, where it has one (Schedule-Free); else nothing."""
        self._pass_on(getattr(self.base, "train", None))

    def eval(self) -> None:
        """Go to the base's evaluation point, where it has one (Schedule-Free); else nothing."""
        self._pass_on(getattr(self.base, "eval", None))

    @torch.no_grad()
    def _pass_on(self, move: Callable[[], Any] | None) -> None:
        """Let the base move its iterates, and the parameters by S times as much.

        Layers that are not being trained (``requires_grad=False``) stay where they are.
        """
        if move is None:
            return
        self._require_entered_groups()
        buckets = self._reduction_and_buckets()[1]
        scale = total_scale(self._tuners(buckets[0].device if buckets else None)[1], torch)
        self._set_leads(buckets, scale)
        for bucket, copies in zip(buckets, self._let_base(buckets, instead=move), strict=True):
            bucket.move(copies, scale, scale)

    @torch.no_grad()
    def observe(self) -> None:
        """Let the gradients now in ``.grad``, those of a held-out batch, tell the next step how to scale.

        The gradients of the step itself then only feed the base, so that S is tuned for data the base does not
        train on. The observed gradients are cleared, and nothing of their size is kept. A step without an
        observation before it tunes by its own gradients, so observing every k-th step only is fine.

        Example:
            >>> import torch
            >>> from mechanic.torch import Mechanic
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
            >>> train, held_out = torch.randn(2, 8, 4)
            >>> model(held_out).square().mean().backward()
            >>> optimizer.observe()
            >>> model(train).square().mean().backward()
            >>> optimizer.step()
        """
        self._require_entered_groups()
        if not self.is_frozen:
            buckets = self._reduction_and_buckets()[1]
            tuner = self._tuners(buckets[0].device if buckets else None)[1]
            sums = _sum_up([(b.row, b.measure()) for b in buckets], len(SUMS), like=tuner.scales)
            self._observed = {row: sums[index] for row, index in groups.rows_of(self.param_groups).items()}
        self.zero_grad()

    def _measure(self, reduction: Reduction, buckets: list[Bucket], tuner: TunerState) -> tuple[Tensor, Tensor]:
        """The five sums that tune, [tuners, 5], and |g|^2 of the gradients that the base is to step with, [tuners].

        These are apart where the sums were observed, and go through the same collective.
        """
        pending, self._observed = self._observed, None
        if pending is None:
            sums = reduction.sum(_sum_up([(b.row, b.measure()) for b in buckets], len(SUMS), like=tuner.scales))
            return sums, sums.unbind(-1)[SUMS.index("grad_sq")]
        grad_sq = _sum_up([(b.row, b.grad_sq()) for b in buckets], 1, like=tuner.scales)
        # A tuner that has been added since was not observed: its sums are 0, a step without feedback.
        none = grad_sq.new_zeros(len(SUMS))
        observed = torch.stack([pending.get(row, none).to(none) for row in groups.rows_of(self.param_groups)])
        *columns, grad_sq = reduction.sum(torch.cat([observed, grad_sq], -1)).unbind(-1)
        return torch.stack(columns, -1), grad_sq

    def _require_entered_groups(self) -> None:
        """Raise where this Mechanic has been released; enter groups that were added to the base itself."""
        if not any(groups.is_entered(group) for group in self.param_groups):
            raise RuntimeError("this Mechanic has been released; use the optimizer that release() returned")
        if not all(groups.is_entered(group) for group in self.param_groups):
            self._enter_groups()

    def _require_all_gradients(self) -> None:
        """Inside a backward pass gradients may be still to come, and the sums would lack them."""
        if torch._C._current_graph_task_id() == -1:
            return
        waiting = [p.requires_grad and p.grad is None for p in groups.params_of(self.param_groups)]
        if any(waiting):
            raise RuntimeError(
                f"step() was called inside the backward pass, while {sum(waiting)} of {len(waiting)} parameters have "
                "no gradient, and Mechanic's feedback is a sum over all: turn 'fused backward pass' off and step "
                "after backward(), or give every parameter that steps by itself a Mechanic of its own"
            )

    def _tuners(self, device: torch.device | None) -> tuple[Tensor, TunerState]:
        """The betas and the state of every tuner, each [tuners, n]."""
        betas, *fields = groups.read_tuners(self.param_groups, device).unbind(1)
        return betas, TunerState(*fields)

    def _reduction_and_buckets(self, decays: list[float] | None = None) -> tuple[Reduction, list[Bucket]]:
        if self._reduction is None or not self._reduction.knows(groups.params_of(self.param_groups)):
            self._reduction = Reduction(groups.params_of(self.param_groups), self.process_group, self._elements)
        ascends = bool(getattr(self.base, "maximize", False))  # where it is no option of the groups
        options: dict[str, Any] = {"frozen": self.is_frozen, "ascends": ascends, "decays": decays}
        return self._reduction, buckets_of(self.param_groups, self.state, self._reduction, **options)

    def _complete_state(self) -> None:
        """Put Delta beside all state that the base has, so that every checkpoint is whole.

        torch.distributed.checkpoint, too, makes no step to fill the state of an optimizer that has some (Adagrad).
        """
        for p in groups.params_of(self.param_groups):
            if state := self.state.get(p):
                state.update(own_state(p, state, frozen=self.is_frozen))

    def _enter_groups(self) -> None:
        name = type(self.base).__name__
        former_rows = [*self._presence.rows(), *(self._observed or ())]
        options: dict[str, Any] = {"per_group": self.per_group, "former_rows": former_rows}
        groups.enter(self.param_groups, self.config, self._unit, name, **options)
        if self.own_iterates:
            for group in self.param_groups:
                group["mechanic_own_iterates"] = 1
        self._show_scales()

    def _show_scales(self) -> None:
        if "d" not in self.defaults:  # Adafactor has a d of its own
            groups.show_scales(self.param_groups)

    def _settle_units(self) -> None:
        """Before the first step, see whether OneCycleLR has come since and brought a peak of its own."""
        if self._unit_is_settled:
            return
        if any("max_lr" in group for group in self.param_groups):
            for sharing in groups.by_tuner(self.param_groups, per_group=self.per_group).values():
                unit = groups.unit_of(sharing)
                for group in sharing:
                    group["mechanic_unit"] = unit
        self._warn_of_another_peak()
        # A step with lr = 0 moves nothing: torch.distributed.checkpoint makes one before it loads.
        self._unit_is_settled = not all(group.get("lr") == 0.0 for group in self.param_groups)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters in mid-training. They start with Delta = 0 and join the tuner they name, or start one."""
        self._require_entered_groups()
        count = len(self.param_groups)
        try:
            self.base.add_param_group(param_group)
            self._enter_groups()
        except Exception:
            del self.param_groups[count:]
            raise

    # Warnings, each at most once.

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, stacklevel=4)

    def _warn_of_another_peak(self) -> None:
        """CyclicLR, for one, ignores the learning rate that the base was built with."""
        for sharing in groups.by_tuner(self.param_groups, per_group=self.per_group).values():
            starts = [float(group["initial_lr"]) for group in sharing if "initial_lr" in group]
            unit = sharing[0]["mechanic_unit"]
            if starts and max(starts) != unit and not any("max_lr" in group for group in sharing):
                self._warn_once(
                    "peak",
                    f"a scheduler starts from a learning rate of {max(starts):g}, not from the {unit:g} that the base "
                    "was built with and that counts as 1; pass the peak of the schedule, Mechanic(base, unit=...)",
                )

    def _warn_if_nothing_is_learned(self) -> None:
        steps, nonfinite = groups.step_counts(self.param_groups)
        nonfinite += self.skipped_steps
        if nonfinite >= 10 and nonfinite > steps:
            self._warn_once(
                "nonfinite",
                f"the gradients of {nonfinite} steps so far were not finite, and of {steps} they were: Mechanic learns "
                "nothing from such steps. Is the loss scaled? Call scaler.step(optimizer), which unscales the "
                "gradients, not optimizer.step(); else look for NaN in the loss",
            )

    # Seeing what was learned.

    def scales(self) -> dict[str, float]:
        """S of every tuner by its name: the factor on the base's updates, at the learning rate it was built with."""
        scales = {name: float(groups.scale_of(sharing[0])) for name, sharing in self._groups_by_tuner().items()}
        if not all(scales.values()):
            self._warn_if_nothing_is_learned()
        return scales

    def learning_rates(self) -> dict[str, float]:
        """The effective learning rate of the last step, by tuner: S, times where the schedule stood.

        Of groups that share a tuner, the one with the largest ``lr`` speaks; ``group["d"] * group["lr"]`` tells
        it of every group by itself, at the learning rate that a scheduler has set since.
        """
        scales = self.scales()
        return {
            name: max(
                scales[name] * float(group["mechanic_lr" if "mechanic_lr" in group else "lr"]) / group["mechanic_unit"]
                for group in sharing
            )
            for name, sharing in self._groups_by_tuner().items()
        }

    def get_avg_learning_rate(self) -> float:
        """The mean of :meth:`learning_rates`, under the name that ai-toolkit asks an optimizer for."""
        rates = self.learning_rates()
        return sum(rates.values()) / len(rates)

    def _groups_by_tuner(self) -> dict[str, list[Group]]:
        self._require_entered_groups()
        return groups.by_tuner(self.param_groups, per_group=self.per_group)

    @property
    def nonfinite_steps(self) -> int:
        """How many steps so far had gradients that were not finite, whether they were skipped or not.

        Counted on the device, and read from it here.
        """
        self._require_entered_groups()
        return groups.step_counts(self.param_groups)[1] + self.skipped_steps

    @property
    def skipped_steps(self) -> int:
        """How many steps ``skip_nonfinite`` has skipped so far."""
        return int(self.param_groups[0].get("mechanic_skipped", 0))

    def _count_skipped_step(self) -> None:
        skipped = self.skipped_steps + 1
        for group in self.param_groups:
            group["mechanic_skipped"] = skipped
        self._warn_if_nothing_is_learned()

    # Keeping what was learned.

    @property
    def is_frozen(self) -> bool:
        """Whether :meth:`freeze` has been called."""
        return "mechanic_frozen" in self.param_groups[0]

    def freeze(self) -> None:
        """Stop tuning: keep S as it is, and drop Delta and its memory.

        From here on a step is the base's own at ``lr * d``. Around a base whose update is not known to be
        proportional to lr, a working copy of the parameters is kept to scale it.
        """
        if self.own_iterates:
            raise TypeError(
                f"{type(self.base).__name__} steps on iterates of its own, which are not scaled, so it cannot go on "
                "without Delta; keep tuning"
            )
        scales = self.scales()
        if not all(scale > 0 for scale in scales.values()):
            raise ValueError(f"nothing has been learned yet, the scales are {scales}; take some steps first")
        for name, sharing in self._groups_by_tuner().items():
            for group in sharing:
                group["mechanic_frozen"] = scales[name]
        for p in groups.params_of(self.param_groups):
            self.state.get(p, {}).pop(DELTA, None)

    def release(self) -> BaseT:
        """Hand back the base, its learning rates multiplied by what was learned; this Mechanic steps no more.

        A scheduler built on the result with ``last_epoch=former.last_epoch - 1`` continues where the former one
        stood: the first of its steps it makes by itself.
        """
        self._require_entered_groups()
        if not is_linear_in_lr(self.base):
            raise TypeError(
                f"the update of {type(self.base).__name__} is not known to be proportional to lr, so the learned "
                "scale cannot be handed over as a learning rate; call freeze() and go on with Mechanic"
            )
        if not self.is_frozen:
            self.freeze()
        for group in self.param_groups:
            factor = group["mechanic_frozen"] / group["mechanic_unit"]
            for key in ("lr", "initial_lr", "max_lr", "min_lr"):
                if group.get(key) is not None:
                    group[key] = group[key] * factor
        groups.leave(self.param_groups)
        if self._direct_steps:
            self._direct_steps.remove()
        for p in groups.params_of(self.param_groups):
            self.state.get(p, {}).pop(RESIDUAL, None)
        self.base.load_state_dict(self.base.state_dict())  # casts the moments to the parameters' dtype
        return self.base

    def _step_frozen(self) -> bool:
        """The base's own step at lr * d; on copies where rounding or an update not proportional to lr needs them.

        Returns whether it was made, and not skipped.
        """
        if self._is_linear is None:
            self._is_linear = is_linear_in_lr(self.base)
        linear = self._is_linear
        in_place = linear and not any(is_half_precision(dtype) for dtype in self._trainable_dtypes())
        reduction, buckets = (None, []) if in_place and not self.skip_nonfinite else self._reduction_and_buckets()
        if reduction is not None and self.skip_nonfinite:
            like = self._tuners(buckets[0].device if buckets else None)[1].scales
            if not reduction.sum(_sum_up([(b.row, b.grad_sq()) for b in buckets], 1, like)).isfinite().all():
                self._count_skipped_step()
                return False
        buckets = [] if in_place else [bucket for bucket in buckets if bucket.has_grad]
        for bucket, copies in zip(buckets, self._let_base(buckets, scale_lr=linear), strict=True):
            bucket.move_frozen(copies, None if linear else total_scale(self._tuners(bucket.device)[1], torch))
        return True

    # Checkpoints.

    def state_dict(self) -> StateDict:
        """The base's state dict; what Mechanic adds to it is listed in :mod:`mechanic.torch.checkpoint`."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self.base.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a checkpoint, bit for bit; or from one of the bare base, with a fresh tuner.

        The config this optimizer was built with stays in force, but the betas have to be those of the checkpoint. A
        checkpoint that does not fit is refused with a ValueError that names the entry, and nothing has changed then.
        """
        self._require_entered_groups()
        state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict  # hooks may write to it
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        checkpoint.check_structure(state_dict, self.param_groups)
        expected = expected_state(self.base, state_dict["param_groups"])
        checkpoint.validate(state_dict, self.param_groups, expected)
        is_plain = checkpoint.is_plain(state_dict)
        if is_plain and self._unit is None:
            groups.unit_of(state_dict["param_groups"])  # raises before anything has been changed
        before = vars(self.base).copy(), vars(self).copy()
        try:
            self._load(state_dict)
        except Exception:
            for owner, variables in zip((self.base, self), before, strict=True):
                vars(owner).clear()
                vars(owner).update(variables)
            raise
        if is_plain:
            warnings.warn(
                "the checkpoint is a plain optimizer's: its state is kept, and Mechanic starts with a fresh tuner",
                stacklevel=2,
            )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, state_dict: StateDict) -> None:
        former = self.param_groups
        of_base, own = checkpoint.take_apart(state_dict, d_is_ours="d" not in self.defaults)
        try:
            with widened(groups.params_of(former)):
                self.base.load_state_dict(of_base)
        except Exception as error:
            name = type(self.base).__name__
            raise ValueError(
                f"{name} could not load the checkpoint's state: {type(error).__name__}: {error}"
            ) from error
        checkpoint.require_options(self.defaults, state_dict["param_groups"], former, self.param_groups)
        saved_params = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for saved, p in zip(saved_params, groups.params_of(self.param_groups), strict=True):
            for key, tensor in own.get(saved, {}).items():
                self.state[p][key] = tensor.to(p.device)
        for group, before in zip(self.param_groups, former, strict=True):
            if "mechanic_row" in group:
                group["mechanic_row"] = before["mechanic_row"]
            if "tuner" in before:
                group["tuner"] = before["tuner"]
        self._observed = None
        self._is_linear = None
        self._presence = groups.Presence()
        self._enter_groups()
        self._complete_state()
        started = any(group["mechanic_tuner"][1:].any() for group in self.param_groups)
        self._unit_is_settled = started or self._unit is not None

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in _OPTIONS}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.base).__name__}, {len(self.param_groups)} groups, {self.config})"


def _sum_up(parts: list[tuple[int, Tensor]], width: int, like: Tensor) -> Tensor:
    """Sums by tuner, [tuners, width], of parts that name their tuner's row; where ``like`` is, [tuners, ...]."""
    sums = [torch.zeros(width, dtype=like.dtype, device=like.device) for _ in range(len(like))]
    for row, part in parts:
        sums[row] += part.to(like)
    return torch.stack(sums)
