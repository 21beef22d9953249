"""Parameters in lists: those of one tuner, on one device, in one dtype, with or without a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.kernels import eager
from mechanic.torch.kernels.rounding import is_half_precision, working_dtype
from mechanic.torch.kernels.storage import Noises
from mechanic.torch.layout import DELTA, RESIDUAL, params_of
from mechanic.torch.private import foreach_mul_
from mechanic.torch.shards import is_dtensor, locals_of, set_local, wide_twin
from mechanic.torch.together import members_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Scaling(NamedTuple):
    """How a step scales what the base does, each [tuners]."""

    before: Tensor  # S
    after: Tensor  # S'
    delta_retention: Tensor | None = None  # k, the share of Delta that is kept; None is all of it
    noises: Noises | None = None  # what a stored Delta is rounded with


@contextmanager
def widened(base: Optimizer, *, but_for: torch.dtype | None) -> Iterator[None]:
    """Present half-precision parameters as float32, which the base steps on: torch casts loaded state to match."""

    def nothing_like(p: Tensor) -> Tensor:
        return torch.empty(0, dtype=working_dtype(p.dtype), device=p.device)

    half = [p for p in params_of(base.param_groups) if is_half_precision(p.dtype) and p.dtype != but_for]
    originals = [(p, p.data, p.grad) for p in half if not is_dtensor(p)]
    try:
        for p, _, _ in originals:
            repoint(p, nothing_like(p), None)
        with replaced(base, {p: nothing_like(p) for p in half if is_dtensor(p)}):
            yield
    finally:
        for p, data, grad in originals:
            repoint(p, data, grad)


@contextmanager
def replaced(base: Optimizer, stand_ins: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let a base see other tensors in place of some parameters, with the parameters' state.

    The dtype of a DTensor is a part of its layout, so it cannot be pointed at data in another dtype.
    """
    if not stand_ins:
        yield
        return
    _exchange(base, stand_ins)
    try:
        yield
    finally:
        _exchange(base, {stand_in: p for p, stand_in in stand_ins.items()})


def _exchange(base: Optimizer, others: Mapping[Tensor, Tensor]) -> None:
    for group in base.param_groups:
        group["params"] = [others.get(p, p) for p in group["params"]]
    for optimizer in {base, *members_of(base)}:  # members keep states of their own
        for p, other in others.items():
            if p in optimizer.state:
                optimizer.state[other] = optimizer.state.pop(p)


@dataclass
class Bucket:
    """Trainable parameters that can be worked on as one list.

    The base never steps on the parameters themselves. It steps on working copies in at least float32: the parameters
    are pointed at the copies for the time of the step, and back afterwards. So a base that fails has not touched them,
    and its update is not lost in the rounding of a half-precision parameter.

    A base that does not look at the values it steps on needs no copies: the parameters are pointed at Delta itself.
    """

    row: int  # of the tuner
    sign: float  # -1 if the base ascends
    weight: float  # of what this rank holds in the sum over ranks
    device: torch.device
    dtype: torch.dtype
    sharded: bool  # DTensors
    has_grad: bool
    moves: bool  # it has a gradient, or a Delta from earlier ones
    decay: float  # the share of x that weight decay takes; used only if the base steps on Delta
    own_iterates: bool = False  # the base steps on x_1 + Delta
    steps_on_delta: bool = False
    params: list[Tensor] = field(default_factory=list)
    mechanic_state: list[dict[str, Tensor]] = field(default_factory=list)  # see mechanic_state_of
    _scaling: Scaling | None = None  # of the step that is being made
    _originals: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # data and gradient, while lent
    stand_ins: dict[Tensor, Tensor] = field(default_factory=dict)  # what the base is to see instead, while lent

    @property
    def deltas(self) -> list[Tensor]:
        return locals_of([kept[DELTA] for kept in self.mechanic_state if kept], sharded=self.sharded)

    @property
    def lends_delta(self) -> bool:
        """Whether the base steps on what is kept as Delta, and not on a copy: if it fails halfway, that has changed."""
        return self.steps_on_delta

    @property
    def residuals(self) -> list[Tensor]:
        return locals_of([kept[RESIDUAL] for kept in self.mechanic_state], sharded=self.sharded)

    @property
    def lent_dtype(self) -> torch.dtype:
        """Of what the base steps on."""
        return working_dtype(self.dtype)

    def measure(self) -> Tensor:
        """The five sums, [5], of what this rank holds."""
        sums = eager.measure(self._local_params(), self._grads(), self.deltas, self.sign, self.device)
        return sums if self.weight == 1 else sums * self.weight

    def grad_sq(self) -> Tensor:
        """|g|^2, [1], of what this rank holds; not weighted, as it only tells whether the gradients are finite."""
        return eager.squared_norm(self._grads(), self.device).reshape(1)

    def discard_grads_unless(self, finite: Tensor) -> None:
        """Zero the gradients if the flag of their tuner is False, [tuners]: the base must not see them."""
        flag = self._of_this_tuner(finite)
        if eager.is_on_host(flag) and flag:
            return
        if not self.sharded:
            for p in self.params:
                if p.grad is not None and not eager.can_be_cleared(p.grad):
                    p.grad = p.grad.clone().resolve_neg().resolve_conj().contiguous()
        eager.clear_unless(flag, self._grads())

    def scale_with(self, scaling: Scaling) -> None:
        """Set the scales of the step that is about to be made."""
        self._scaling = scaling

    def lend(self) -> None:
        """Point the parameters at what the base is to step on: working copies, or Delta itself."""
        lent = self._to_lend()
        if self.lent_dtype != self.dtype and self.sharded:
            self.stand_ins = {p: wide_twin(p, data) for p, data in zip(self.params, lent, strict=True)}
            return
        grads: list[Tensor | None] = [None] * len(lent)
        wide: list[Tensor | None] = [None] * len(lent)
        if self.lent_dtype != self.dtype:
            grads = [p.grad for p in self.params]
            with_grad = [grad for grad in grads if grad is not None]
            copies = iter(eager.copies_of(with_grad, working_dtype(self.dtype)))
            wide = [None if grad is None else next(copies) for grad in grads]
        for p, data, tensor, grad, wide_grad in zip(self.params, self._data(), lent, grads, wide, strict=True):
            self._originals.append((data, grad))
            repoint(p, tensor, wide_grad)

    def _to_lend(self) -> list[Tensor]:
        if self.steps_on_delta:
            # Only what the base adds to Delta matters. Meanwhile the parameters hold x_1, and wait for S' Delta'.
            eager.prepare_delta(self._local_params(), self.deltas, self._before(), self.decay, self._retention())
            return self.deltas
        copies = self._values(copy=True)
        if self.own_iterates:
            eager.add_scaled(copies, self.deltas, self._offset_along_delta())
        return copies

    def take_back(self) -> list[Tensor]:
        """Point the parameters at their own data again. Returns what they were pointed at, as the base left it."""
        if self.stand_ins:
            stepped = locals_of(list(self.stand_ins.values()), sharded=True)
            self.stand_ins = {}
            return stepped
        stepped = self._data() if self._originals else []
        for p, (data, grad) in zip(self.params, self._originals, strict=False):
            repoint(p, data, grad)
        self._originals = []
        return stepped

    def give_up(self, stepped: list[Tensor], forgotten: set[Tensor]) -> None:
        """The base has failed: bring parameters and Delta back to where they were.

        What the base did to copies is dropped. What it has already added to Delta stays there, scaled by the S of
        before, just as a bare optimizer that fails halfway has moved some of its parameters. The Delta of ``forgotten``
        parameters was 0 and is not kept, so they are where they were.
        """
        if not (stepped and self.steps_on_delta):
            return
        lists = zip(self.params, self._local_params(), self.deltas, strict=True)
        remembered = [(x, delta) for p, x, delta in lists if p not in forgotten]
        if remembered:
            values, deltas = (list(tensors) for tensors in zip(*remembered, strict=True))
            eager.restore_delta(values, deltas, self._before(), self.decay, self._retention())

    def move(self, stepped: list[Tensor]) -> None:
        """Move the parameters by S' Delta' - S Delta, where ``stepped`` tells what the base did, if it stepped."""
        if not self.moves:
            return
        values = self._values()
        before, after, delta_retention, _ = self._require_scaling()
        if stepped and self.steps_on_delta:
            eager.add_scaled(values, self.deltas, self._scalar(after))
            return
        if stepped and self.own_iterates:
            eager.add_scaled(stepped, self.deltas, -self._offset_along_delta())
        retention = self._retention()
        if delta_retention is not None:
            # x' = x + S' Delta' - S Delta does not change if Delta shrinks and S grows by the same factor.
            before = before / delta_retention
        change = self._scalar(after - before)
        if stepped:
            eager.combine(values, stepped, self.deltas, self._scalar(before), change, retention)
        else:
            if retention is not None:
                foreach_mul_(self.deltas, retention)
            eager.add_scaled(values, self.deltas, change)
        self._store(values)

    def move_back(self) -> None:
        """After :meth:`move`: from x_1 + S' Delta' to x_1 + S Delta'. The base has failed in a later part."""
        if self.moves:
            before, after, _, _ = self._require_scaling()
            values = self._values()
            eager.add_scaled(values, self.deltas, self._scalar(before - after))
            self._store(values)

    def move_frozen(self, stepped: list[Tensor], scale: Tensor | None) -> None:
        """Apply what the base did, times a fixed S, [tuners]; None if the base has applied S already."""
        values = self._values()
        eager.add_scaled_step(values, stepped, None if scale is None else self._scalar(scale))
        self._store(values)

    def split(self, most: int) -> Iterator[Self]:
        """Buckets of at most so many elements, or of one tensor that has more."""
        first = elements = 0
        for index, p in enumerate(self._local_params()):
            if index > first and elements + p.numel() > most:
                yield self.part(first, index)
                first, elements = index, 0
            elements += p.numel()
        yield self.part(first, len(self.params))

    def part(self, first: int, end: int, **lists: Any) -> Self:
        """The parameters from ``first`` to ``end`` as a bucket; ``lists`` are those that a subclass has."""
        params, mechanic_state = self.params[first:end], self.mechanic_state[first:end]
        return replace(self, _originals=[], params=params, mechanic_state=mechanic_state, **lists)

    def _require_scaling(self) -> Scaling:
        assert self._scaling is not None, "scale_with comes first"
        return self._scaling

    def _before(self) -> Tensor:
        return self._scalar(self._require_scaling().before)

    def _retention(self) -> Tensor | None:
        retention = self._require_scaling().delta_retention
        return None if retention is None else self._scalar(retention)

    def _offset_along_delta(self) -> Tensor:
        """1 - S: the base's own iterates are at x_1 + Delta, the parameters at x_1 + S Delta."""
        return self._scalar(1 - self._require_scaling().before)

    def _local_params(self) -> list[Tensor]:
        return locals_of(self.params, sharded=self.sharded)

    def _data(self) -> list[Tensor]:
        """What :func:`set_local` puts back."""
        return self._local_params() if self.sharded else [p.data for p in self.params]

    def _grads(self) -> list[Tensor]:
        return locals_of([p.grad for p in self.params if p.grad is not None], sharded=self.sharded)

    def _values(self, *, copy: bool = False) -> list[Tensor]:
        if is_half_precision(self.dtype):
            return eager.values_of(self._local_params(), self.residuals)
        params = self._local_params()
        return eager.copies_of(params, self.dtype) if copy else params

    def _store(self, values: list[Tensor]) -> None:
        if is_half_precision(self.dtype):
            eager.store_rounded(values, self._local_params(), self.residuals)

    def _of_this_tuner(self, per_tuner: Tensor) -> Tensor:
        return per_tuner.unbind()[self.row].to(self.device)

    def _scalar(self, per_tuner: Tensor) -> Tensor:
        return self._of_this_tuner(per_tuner).to(working_dtype(self.dtype).to_real())


def repoint(p: Tensor, data: Tensor, grad: Tensor | None) -> None:
    """Let a parameter hold other data. If the dtype changes, the gradient is replaced too: both have to agree."""
    if p.dtype == data.dtype:
        set_local(p, data)
    else:
        p.grad = None
        p.data = data
        p.grad = grad
