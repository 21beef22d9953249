"""Mechanic as PyTorch sees it: an optimizer around an optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.config import TunerConfig
from mechanic.torch import checkpoint, step
from mechanic.torch.backward import BackwardSteps
from mechanic.torch.base import is_linear_in_lr, keeps_own_iterates, refuse_unsuitable
from mechanic.torch.layout import hand_over, last_rate, read_on_host
from mechanic.torch.private import outside_of_compiled_code, run_load_state_dict_hooks, run_state_dict_hooks
from mechanic.torch.wrapped import BaseT, Wrapped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _of_base(name: str) -> Any:
    """The base's own, looked up every time: load_state_dict replaces it there, and frameworks write to it."""
    return property(lambda self: getattr(self.base, name), lambda self, value: setattr(self.base, name, value))


class Mechanic(Optimizer, Generic[BaseT]):
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
        delta: what Delta is kept in: ``torch.float32``, ``torch.bfloat16`` or ``"int8"``, 1.02 bytes each. The default
            is bfloat16 for parameters in half precision, and else the parameter's dtype, as it always is for complex
            parameters. In bfloat16 and int8 it is rounded stochastically, without torch's random numbers. AdamW, Adam,
            SGD and bases in few bits then keep their state of bfloat16 parameters in bfloat16, as they do bare.

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
        if not any(delta is choice or delta == choice for choice in (None, torch.float32, torch.bfloat16, "int8")):
            raise ValueError(f"delta must be torch.float32, torch.bfloat16 or 'int8', got {delta!r}")
        config = TunerConfig.of(config)
        if own_iterates := own_iterates or keeps_own_iterates(base):
            config = dataclasses.replace(config, forgetting=0.0)  # the base keeps points that could not follow
        self._wrapped = Wrapped(base, config, peak_lr, per_group, skip_nonfinite, own_iterates, process_group, delta)
        checkpoint.begin(self._wrapped)
        self._backward = BackwardSteps(self._wrapped)
        self.__setstate__({})  # makes what hooks need; Optimizer.__init__ would make groups of its own

    @property
    def base(self) -> BaseT:
        """The optimizer that was wrapped."""
        return self._wrapped.base

    @property
    def config(self) -> TunerConfig:
        return self._wrapped.config

    param_groups: list[dict[str, Any]] = _of_base("param_groups")
    state: Any = _of_base("state")
    defaults: dict[str, Any] = _of_base("defaults")

    @outside_of_compiled_code
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make one step: measure, tune, let the base step, and scale what it did. Returns what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._wrapped.require_assigned_groups()
        self._wrapped.settle_peak_lr()
        if not self._backward.step():
            step.step(self._wrapped)
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
        self._backward.refuse_observation()
        if not self.is_frozen:
            step.observe(self._wrapped)
        self.zero_grad()

    @torch.no_grad()
    def train(self) -> None:
        """Go to the base's training point if it has one (Schedule-Free); else do nothing.

        Layers that are not being trained (``requires_grad=False``) stay where they are.
        """
        step.switch_mode(self._wrapped, "train")

    @torch.no_grad()
    def eval(self) -> None:
        """Go to the base's evaluation point if it has one (Schedule-Free); else do nothing."""
        step.switch_mode(self._wrapped, "eval")

    def step_in_backward(self, enabled: bool = True) -> None:
        """Step each parameter inside ``backward()``, as soon as its gradient is there, and free the gradient.

        So the gradients are never all there at the same time. Call this once, and leave the training loop as it is:
        ``step()`` after ``backward()`` then only tunes, and moves the parameters to the new scale. With
        ``enabled=False`` all is as before.

        There is nothing left to clip after ``backward()``: ``docs/memory.md`` tells what can be had instead, and what
        is promised of NaN and infinite gradients. One backward pass is one step: gradients cannot be accumulated over
        several, and nothing can be saved or copied between ``backward()`` and ``step()``. DDP, ``skip_nonfinite``,
        ``observe()`` and bases that are not known to step every parameter by itself are refused.

        Example:
            >>> import torch
            >>> from mechanic.torch import Mechanic
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
            >>> optimizer.step_in_backward()
            >>> for _ in range(3):
            ...     model(torch.ones(8, 4)).square().mean().backward()
            ...     optimizer.step()
            >>> model.weight.grad is None
            True
        """
        self._backward.hook(enabled)

    def take_gradient(self, parameter: Tensor) -> None:
        """Step with the gradient of one parameter now, and free it; then call ``step()`` to end the step.

        For trainers that have hooks of their own on the parameters, in place of :meth:`step_in_backward`.
        """
        self._backward.take(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients. After a backward pass that was broken off, this also forgets what had come of it."""
        self._backward.give_up()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
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

    def learned_rates(self) -> dict[str, float]:
        """The learning rate to train with next time, by tuner: the mean of S, weighted with the schedule.

        The first 50 steps are left out, in which S finds its size; until then this is S. The last S is mostly noise if
        a schedule ends near 0, since such small steps tell little. :meth:`freeze` and :meth:`release` use the mean.
        """
        return self._wrapped.learned_rates()

    def learning_rates(self) -> dict[str, float]:
        """The effective learning rate of the last step, by tuner: S times lr / peak_lr.

        If several groups share a tuner, this is that of the group with the largest ``lr``. ``group["d"] * group["lr"]``
        is the effective learning rate of one group, at the learning rate that a scheduler has set since.
        """
        sharing, scales = self._wrapped.by_tuner(), self.scales()
        return {name: scale * max(map(last_rate, sharing[name])) for name, scale in scales.items()}

    @property
    def nonfinite_steps(self) -> int:
        """How many steps so far had NaN or infinite gradients, whether they were skipped or not.

        A step also counts if the gradients or Delta are so large that the sum of their squares overflows. Steps are
        counted on the device, and reading this waits for it.
        """
        self._wrapped.require_assigned_groups()
        return int(read_on_host(self.param_groups).nonfinite_steps.max()) + self.skipped_steps

    @property
    def skipped_steps(self) -> int:
        """How many steps ``skip_nonfinite`` has skipped so far."""
        return self._wrapped.skipped_steps

    @property
    def is_frozen(self) -> bool:
        """Whether :meth:`freeze` has been called."""
        return self._wrapped.is_frozen

    def freeze(self) -> None:
        """Stop tuning: S becomes its mean, see :meth:`learned_rates`, and Delta and its memory are dropped.

        From now on a step is S times the base's own. NaN and infinite gradients reach the base, as they would without
        Mechanic, unless it was built with ``skip_nonfinite=True``.
        """
        self._backward.refuse_unfinished("freeze() was called")
        self._wrapped.freeze()

    def release(self) -> BaseT:
        """Return the base, with its learning rates multiplied by what was learned. This Mechanic cannot step any more.

        The base has to be one of torch's, or one with state in few bits, whose update is known to be proportional to
        lr.

        Build a scheduler on the result with ``last_epoch=former.last_epoch - 1`` to continue a former one: a new
        scheduler makes its first step by itself.
        """
        self._wrapped.require_assigned_groups()
        self._backward.refuse_unfinished("release() was called")
        if not is_linear_in_lr(self.base):
            raise TypeError(
                f"the update of {type(self.base).__name__} is not known to be proportional to lr, so the learned scale "
                "cannot be handed over as a learning rate; call freeze() and go on with Mechanic"
            )
        if not self.is_frozen:
            self._wrapped.freeze()
        hand_over(self.param_groups)
        self._wrapped.drop("mechanic_")
        self.base.load_state_dict(self.base.state_dict())  # casts the moments to the parameters' dtype
        self._backward.hook(False)
        return self.base

    # Checkpoints and copies.

    def state_dict(self) -> dict[str, Any]:
        """The base's state dict. :mod:`mechanic.torch.layout` lists what Mechanic adds to it."""
        self._backward.refuse_unfinished("state_dict() was called")
        return run_state_dict_hooks(self, lambda: checkpoint.state_dict_of(self.base))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint, bit for bit; or from one of the bare base, with a new tuner.

        The config that this optimizer was built with is used, but the betas have to be those of the checkpoint. If a
        checkpoint does not fit, a ValueError names the entry, and nothing has changed.
        """
        self._wrapped.require_assigned_groups()
        run_load_state_dict_hooks(self, state_dict, lambda found: checkpoint.load_checked(self._wrapped, found))
        self._backward.discard()

    def __getstate__(self) -> dict[str, Any]:
        self._backward.refuse_unfinished("the optimizer was copied or pickled")
        return {"_wrapped": self._wrapped, "_backward": self._backward}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.base).__name__}, {len(self.param_groups)} groups, {self.config})"
