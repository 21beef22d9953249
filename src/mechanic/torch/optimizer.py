"""Mechanic as PyTorch sees it: an optimizer around an optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch
from torch.optim import Optimizer

from mechanic.config import TunerConfig
from mechanic.torch import capture, checkpoint, freezing, step, tuners
from mechanic.torch.backward import Arrivals, StepsInBackward
from mechanic.torch.bases import keeps_own_iterates, refuse_unsuitable
from mechanic.torch.layout import Group, StateDict
from mechanic.torch.private import outside_of_compiled_code, run_load_state_dict_hooks, run_state_dict_hooks
from mechanic.torch.stored import check_choice
from mechanic.torch.together import switch_of
from mechanic.torch.wrapped import BaseT, Wrapped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self


T = TypeVar("T")


class _OfBase(Generic[T]):
    """An attribute of the base, looked up every time: load_state_dict replaces it there, and frameworks write to it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, mechanic: Mechanic[Any], owner: type | None = None) -> T:
        value: T = getattr(mechanic.base, self._name)
        return value

    def __set__(self, mechanic: Mechanic[Any], value: T) -> None:
        setattr(mechanic.base, self._name, value)


class Mechanic(StepsInBackward, Generic[BaseT]):
    """Learn the size of another optimizer's steps while training.

    Change ``optimizer = AdamW(model.parameters(), lr=3e-4)`` to
    ``optimizer = Mechanic(AdamW(model.parameters(), lr=1.0))`` and leave the rest of the training script as it is.

    The base optimizer proposes updates. Delta is their sum, and the parameters are kept at x_1 + S Delta, where S is
    learned from the gradients. The learning rate that the base was built with counts as 1, so its size does not
    matter: only its course over time (a schedule) and its ratios between param groups do.

    ``state``, ``param_groups`` and ``defaults`` are the base's own, so schedulers, gradient scalers and checkpoints see
    one optimizer. The tuner and Delta are stored in them; see :mod:`mechanic.torch.layout`.

    Args:
        base: any optimizer that reads ``.grad`` and adds an update to the parameters.
        config: a :class:`mechanic.TunerConfig` or a dict of its fields. The default is meant to be left alone.
        peak_lr: the learning rate that counts as 1: the peak of the schedule. By default it is the one that the base
            was built with, or the peak of a ``OneCycleLR``. Needed only if a scheduler ignores the learning rate that
            the base was built with (``CyclicLR``).
        per_group: give every param group a tuner of its own. By default (False) groups with the same ``"tuner"`` entry
            share one, and so do all groups without such an entry.
        skip_nonfinite: skip a step, the base's included, if a gradient is NaN or infinite, and count it in
            ``skipped_steps``. This reads one flag per step on the host. By default (False) such gradients are replaced
            by zeros, the tuner does not change, and the step never waits for the device.
        own_iterates: let the base step on iterates of its own, x_1 + Delta, and never see the parameters. Needed for
            bases that keep several iterates. Schedule-Free, Lookahead, Ranger, MADGRAD, FTRL and AccSGD are recognised
            without it. The base's weight decay then acts on its own iterates, unscaled.
        process_group: the ranks to sum over if each holds plain tensors of its own (pipeline stages, FSDP1, ZeRO).
            DTensors (FSDP2, tensor parallel) and DDP need none.
        delta: what Delta is kept in: ``torch.float32``, ``torch.bfloat16`` or ``"int8"``, which takes 1.02 bytes per
            parameter. It is rounded stochastically, without torch's random numbers. AdamW, Adam, SGD and bases in few
            bits then make their state of bfloat16 parameters in bfloat16, as they do bare. By default Delta is in
            float32, or in the parameter's dtype if that is wider, as it always is of complex parameters.

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

    _wrapped: Wrapped[BaseT]
    state = _OfBase[Any]()
    param_groups = _OfBase[list[Group]]()
    defaults = _OfBase[dict[str, Any]]()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is Mechanic and (args or kwargs) and not isinstance(args[0] if args else kwargs.get("base"), Optimizer):
            refuse_unsuitable(args[0] if args else kwargs.get("base"))  # before Python refuses lr=1.0
        return super().__new__(cls)

    def __init__(
        self,
        base: BaseT,
        *,
        config: TunerConfig | Mapping[str, Any] | None = None,
        peak_lr: float | None = None,
        per_group: bool = False,
        skip_nonfinite: bool = False,
        own_iterates: bool = False,
        process_group: ProcessGroup | None = None,
        delta: torch.dtype | Literal["int8"] | None = None,
    ) -> None:
        refuse_unsuitable(base)
        if peak_lr is not None and not 0 < peak_lr < math.inf:
            raise ValueError(f"peak_lr must be a positive learning rate, got {peak_lr}")
        check_choice(delta)
        config = TunerConfig.of(config)
        if own_iterates := own_iterates or keeps_own_iterates(base):
            config = dataclasses.replace(config, forgetting=0.0)  # the base keeps points that could not follow
        options = config, peak_lr, per_group, skip_nonfinite, own_iterates, process_group
        wrapped = Wrapped(base, *options, peak_is_settled=peak_lr is not None, delta=delta)
        wrapped.begin()
        # Optimizer.__init__ would make groups of its own; __setstate__ makes only what hooks need.
        self.__setstate__({"_wrapped": wrapped, "_arrivals": Arrivals(wrapped)})

    @property
    def base(self) -> BaseT:
        """The optimizer that was wrapped."""
        return self._wrapped.base

    @property
    def config(self) -> TunerConfig:
        return self._wrapped.config

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @outside_of_compiled_code
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step: measure, tune, let the base step, and scale what it did."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._wrapped.require_assigned_groups()
        capture.refuse_step(self._wrapped)
        self._wrapped.settle_peak_lr()
        if not self._arrivals.step():
            (freezing.step_frozen if self.is_frozen else step.step)(self._wrapped)
        return loss

    @outside_of_compiled_code
    @torch.no_grad()
    def observe(self) -> None:
        """Let the gradients now in ``.grad``, those of a held-out batch, tune the next step.

        The gradients of the step itself are then used only by the base, so S is tuned on data that the base does not
        train on. The observed gradients are cleared, and nothing of their size is kept. A step without an observation
        before it is tuned by its own gradients, so you may observe every k-th step only.

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
        self._wrapped.require_assigned_groups()
        self._arrivals.refuse_observation()
        capture.refuse_observation(self._wrapped)
        if not self.is_frozen:
            step.observe(self._wrapped)
        self.zero_grad()

    def train(self) -> None:
        """Go to the base's training point if it has one (Schedule-Free); else do nothing."""
        self._switch_mode("train")

    def eval(self) -> None:
        """Go to the base's evaluation point if it has one (Schedule-Free); else do nothing."""
        self._switch_mode("eval")

    @torch.no_grad()
    def _switch_mode(self, mode: str) -> None:
        """Layers that are not being trained (``requires_grad=False``) stay where they are."""
        if (switch := switch_of(self.base, mode)) is not None:
            self._wrapped.require_assigned_groups()
            step.switch_mode(self._wrapped, switch)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters in mid-training. They start with Delta = 0 and join the tuner they name, or get a new one."""
        self._wrapped.require_assigned_groups()
        count = len(self.param_groups)
        try:
            self.base.add_param_group(param_group)
            self._wrapped.assign_tuners()
        except Exception:
            del self.param_groups[count:]
            raise

    # What was learned.

    def scales(self) -> dict[str, float]:
        """S of every tuner by its name: the factor on the base's updates when lr is at its peak."""
        return self._wrapped.scales()

    def learning_rates(self) -> dict[str, float]:
        """The effective learning rate of the last step, by tuner: S times lr / peak_lr.

        If several groups share a tuner, this is that of the group with the largest ``lr``. ``group["d"] * group["lr"]``
        is the effective learning rate of one group, at the learning rate that a scheduler has set since.
        """
        return self._wrapped.learning_rates()

    def get_avg_learning_rate(self) -> float:
        """The mean of :meth:`learning_rates`; ai-toolkit asks an optimizer for it under this name."""
        rates = self.learning_rates()
        return sum(rates.values()) / len(rates)

    @property
    def nonfinite_steps(self) -> int:
        """How many steps so far had NaN or infinite gradients, whether they were skipped or not.

        A step also counts if the gradients or Delta are so large that the sum of their squares overflows. Steps are
        counted on the device, and reading this waits for it.
        """
        self._wrapped.require_assigned_groups()
        return tuners.step_counts(self.param_groups)[1] + self.skipped_steps

    @property
    def skipped_steps(self) -> int:
        """How many steps ``skip_nonfinite`` has skipped so far."""
        return self._wrapped.skipped_steps

    @property
    def is_frozen(self) -> bool:
        """Whether :meth:`freeze` has been called."""
        return self._wrapped.is_frozen

    def freeze(self) -> None:
        """Stop tuning: keep S as it is, and drop Delta and its memory.

        From now on a step is the base's own at ``lr * d``. If the base's update is not proportional to lr, a temporary
        copy of the parameters is used in every step to scale it. NaN and infinite gradients reach the base, as they
        would without Mechanic, unless it was built with ``skip_nonfinite=True``.
        """
        self._arrivals.end()
        freezing.freeze(self._wrapped)

    def release(self) -> BaseT:
        """Return the base, with its learning rates multiplied by what was learned. This Mechanic cannot step any more.

        Build a scheduler on the result with ``last_epoch=former.last_epoch - 1`` to continue a former one: a new
        scheduler makes its first step by itself.
        """
        self._wrapped.require_assigned_groups()
        self._arrivals.end()
        base = freezing.release(self._wrapped)
        self._arrivals.hook(False)
        return base

    # Checkpoints and copies.

    def state_dict(self) -> StateDict:
        """The base's state dict. :mod:`mechanic.torch.layout` lists what Mechanic adds to it."""
        self._arrivals.end()
        state_dict: StateDict = run_state_dict_hooks(self, lambda: checkpoint.state_dict_of(self.base))
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a checkpoint, bit for bit; or from one of the bare base, with a new tuner.

        The config that this optimizer was built with is used, but the betas have to be those of the checkpoint. If a
        checkpoint does not fit, a ValueError names the entry, and nothing has changed.
        """
        self._wrapped.require_assigned_groups()
        run_load_state_dict_hooks(self, state_dict, lambda found: checkpoint.load_checked(self._wrapped, found))
        self._arrivals.give_up()

    def __getstate__(self) -> dict[str, Any]:
        self._arrivals.end()
        return {"_wrapped": self._wrapped, "_arrivals": self._arrivals}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.base).__name__}, {len(self.param_groups)} groups, {self.config})"
