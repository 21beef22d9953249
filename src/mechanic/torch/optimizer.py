"""Mechanic, the wrapper: a torch optimizer around a torch optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from mechanic.torch import checkpoint, vectors
from mechanic.torch.bases import refuse_unsuitable
from mechanic.torch.checkpoint import DELTA, FORMAT, StateDict
from mechanic.tuner import SUMS, TunerConfig, TunerState, total_scale, update

Group = dict[str, Any]


class Mechanic(Optimizer):
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

    Reference: Cutkosky, Defazio, Mehta, "Mechanic: A Learning Rate Tuner", 2023.
    """

    base: Optimizer
    config: TunerConfig
    _unit: float | None
    _unit_is_settled: bool

    def __init__(
        self, base: Optimizer, *, config: TunerConfig | Mapping[str, Any] | None = None, unit: float | None = None
    ) -> None:
        refuse_unsuitable(base)
        if unit is not None and not unit > 0:
            raise ValueError(f"unit must be a positive learning rate, got {unit}")
        # Optimizer.__init__ would make groups of its own; __setstate__ makes only what hooks need.
        self.__setstate__(
            {"base": base, "config": TunerConfig.of(config), "_unit": unit, "_unit_is_settled": unit is not None}
        )
        self._enter_groups(self.param_groups)
        # torch.distributed.checkpoint makes no step to fill the state of an optimizer that has some
        # (Adagrad from the start), so there Delta has to be in it already.
        for p, state in self.state.items():
            if state:
                state[DELTA] = _zero_delta(p)

    # The base's own, looked up every time: load_state_dict rebinds them there, and frameworks write to them.

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base.defaults

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
        self._settle_units()
        buckets = self._buckets()
        if not buckets:
            return loss

        # Measured before the base steps: it may edit gradients in place.
        tuners = self._read_tuners(buckets[0].device)
        betas, *fields = tuners.unbind(1)
        tuner = TunerState(*fields)
        tuned = update(tuner, _sum_up(buckets, tuners), betas, self.config, torch)
        scale, new_scale = total_scale(tuner, torch), total_scale(tuned, torch)  # S, S', [tuners]

        before = [[p.clone() for p in bucket.params] if bucket.has_grad else [] for bucket in buckets]
        with self._base_alone(buckets, before):
            self.base.step()

        for bucket, x in zip(buckets, before, strict=True):
            s, change = (bucket.scalar(value) for value in (scale, new_scale - scale))
            if bucket.has_grad:
                vectors.combine(bucket.params, x, bucket.deltas, s, change)
            else:
                vectors.rescale(bucket.params, bucket.deltas, change)
        self._write_tuners(torch.stack([betas, *tuned], 1))
        return loss

    def _buckets(self) -> list[_Bucket]:
        """The trainable parameters with their Delta, in lists that can be worked on as one."""
        buckets: dict[tuple[Any, ...], _Bucket] = {}
        for group in self.param_groups:
            ascends = group.get("maximize", getattr(self.base, "maximize", False))
            row, sign = group["mechanic_row"], -1.0 if ascends else 1.0
            for p in group["params"]:
                if not p.requires_grad:
                    continue
                if p.grad is not None and p.grad.layout != torch.strided:
                    raise ValueError(
                        f"Mechanic needs dense gradients, got one of layout {p.grad.layout}; "
                        "build the embedding with sparse=False"
                    )
                key = (row, sign, p.device, p.dtype, p.grad is not None)
                if (bucket := buckets.get(key)) is None:
                    bucket = buckets[key] = _Bucket(*key)
                bucket.params.append(p)
                delta = self.state[p].get(DELTA) if p in self.state else None
                bucket.deltas.append(_zero_delta(p) if delta is None else delta)
        return list(buckets.values())

    @contextmanager
    def _base_alone(self, buckets: list[_Bucket], before: list[list[Tensor]]) -> Iterator[None]:
        """Let the base step as if Mechanic were not there; where it fails, nothing but its own state has moved."""
        groups = self.param_groups
        lrs = [group.get("lr") for group in groups]
        # Bases ask whether state[p] is empty to initialise it.
        deltas = {p: state.pop(DELTA) for p, state in self.state.items() if DELTA in state}
        # A frozen parameter that still has a gradient would be stepped by the base.
        frozen = {p: p.grad for p in _params(groups) if not p.requires_grad and p.grad is not None}
        try:
            for group, lr in zip(groups, lrs, strict=True):
                if lr is not None:
                    group["lr"] = lr / group["mechanic_unit"]
            for p in frozen:
                p.grad = None
            with _global_hooks_silenced():
                yield
            for bucket in buckets:
                deltas.update(zip(bucket.params, bucket.deltas, strict=True))
        except BaseException:
            # At x + u the parameters would be anywhere: u has not been scaled.
            for bucket, x in zip(buckets, before, strict=True):
                if bucket.has_grad:
                    torch._foreach_copy_(bucket.params, x)
            raise
        finally:
            for group, lr in zip(groups, lrs, strict=True):
                if lr is not None:
                    group["lr"] = lr
            for p, grad in frozen.items():
                p.grad = grad
            for p, delta in deltas.items():
                self.state[p][DELTA] = delta

    # Tuners. Each group holds a copy of its row, so that no checkpoint route can part groups that share one.

    def _read_tuners(self, device: torch.device) -> Tensor:
        """[tuners, 7, n]: the betas, then the fields of TunerState."""
        dtype = vectors.tuner_dtype(device)
        rows = {}
        for group in self.param_groups:
            if group["mechanic_tuner"].device != device:  # the model was moved, or the checkpoint came from elsewhere
                group["mechanic_tuner"] = group["mechanic_tuner"].to(device, dtype)
            rows[group["mechanic_row"]] = group["mechanic_tuner"]
        return torch.stack([rows[row] for row in sorted(rows)])

    def _write_tuners(self, tuners: Tensor) -> None:
        groups, rows = self.param_groups, tuners.unbind()
        torch._foreach_copy_([g["mechanic_tuner"] for g in groups], [rows[g["mechanic_row"]] for g in groups])

    def _enter_groups(self, groups: list[Group]) -> None:
        """Give new groups their tuner: the one in use, or a fresh one."""
        for group in groups:
            siblings = [g for g in self.param_groups if g.get("mechanic_row") == 0]
            if siblings:
                tuner, unit = siblings[0]["mechanic_tuner"].clone(), siblings[0]["mechanic_unit"]
            else:
                tuner, unit = self._fresh_tuner(), self._unit or _unit_of(self.param_groups)
            group.update(mechanic_format=FORMAT, mechanic_row=0, mechanic_tuner=tuner, mechanic_unit=unit)

    def _fresh_tuner(self) -> Tensor:
        device, betas = next(_params(self.param_groups)).device, self.config.betas
        unused = [[0.0] * len(betas)] * len(TunerState._fields)
        return torch.tensor([betas, *unused], dtype=vectors.tuner_dtype(device), device=device)

    def _settle_units(self) -> None:
        """Before the first step, see whether OneCycleLR has come since and brought a peak of its own."""
        if not self._unit_is_settled and any("max_lr" in group for group in self.param_groups):
            unit = _unit_of(self.param_groups)
            for group in self.param_groups:
                group["mechanic_unit"] = unit
        self._unit_is_settled = True

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters in mid-training. They start with Delta = 0 and join the tuner in use."""
        self.base.add_param_group(param_group)
        self._enter_groups(self.param_groups[-1:])

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

        The config this optimizer was built with stays in force, but the betas have to be those of the checkpoint.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        is_plain = checkpoint.is_plain(state_dict)
        if not is_plain:
            checkpoint.validate(state_dict, self.param_groups)
        plain, deltas = checkpoint.without_deltas(state_dict)
        self.base.load_state_dict(plain)
        saved_params = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for key, p in zip(saved_params, _params(self.param_groups), strict=True):
            if key in deltas:
                self.state[p][DELTA] = deltas[key].to(p.device)
        self._unit_is_settled = not is_plain
        if is_plain:
            self._enter_groups(self.param_groups)
            warnings.warn(
                "the checkpoint is a plain optimizer's: its state is kept, and Mechanic starts with a fresh tuner",
                stacklevel=2,
            )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("base", "config", "_unit", "_unit_is_settled")}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.base).__name__}, {len(self.param_groups)} groups, {self.config})"


@dataclass
class _Bucket:
    """Trainable parameters, with or without a gradient, that can be worked on as one list."""

    row: int  # of the tuner
    sign: float  # -1 where the base ascends
    device: torch.device
    dtype: torch.dtype
    has_grad: bool
    params: list[Tensor] = field(default_factory=list)
    deltas: list[Tensor] = field(default_factory=list)

    def measure(self) -> Tensor:
        """The five sums, [5]."""
        grads = [p.grad for p in self.params if p.grad is not None]
        return vectors.measure(self.params, grads, self.deltas, self.sign, self.device)

    def scalar(self, per_tuner: Tensor) -> Tensor:
        """This bucket's entry of a [tuners] tensor, ready to be multiplied with its parameters."""
        return per_tuner.unbind()[self.row].to(self.device, vectors.delta_dtype(self.dtype).to_real())


@torch.no_grad()
def _zero_delta(p: Tensor) -> Tensor:
    return torch.zeros_like(p, dtype=vectors.delta_dtype(p.dtype))


def _params(groups: list[Group]) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in groups)


def _sum_up(buckets: list[_Bucket], tuners: Tensor) -> Tensor:
    """The five sums of every tuner, [tuners, 5], on the tuners' device."""
    sums = [torch.zeros(len(SUMS), dtype=tuners.dtype, device=tuners.device) for _ in range(len(tuners))]
    for bucket in buckets:
        sums[bucket.row] += bucket.measure().to(tuners)
    return torch.stack(sums)


def _unit_of(groups: list[Group]) -> float:
    """The learning rate the groups were built with: the peak of a schedule, not where it stands now."""
    peaks = [group.get("max_lr", group.get("initial_lr", group.get("lr"))) for group in groups]
    sizes = [float(peak) for peak in peaks if peak is not None]
    if sizes and not max(sizes) > 0:
        raise ValueError(
            "every learning rate is 0, so there is no step to scale; build the base with any positive lr, e.g. lr=1.0"
        )
    return max(sizes, default=1.0)


@contextmanager
def _global_hooks_silenced() -> Iterator[None]:
    """Keep hooks on all optimizers to one call per step, Mechanic's; the base's step is part of it."""
    registries: list[dict[int, Any]] = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    kept = [dict(registry) for registry in registries]
    for registry in registries:
        registry.clear()
    try:
        yield
    finally:
        for registry, hooks in zip(registries, kept, strict=True):
            registry.update(hooks)
