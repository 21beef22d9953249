"""Parameters in lists: those of one tuner, on one device, in one dtype, with or without a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mechanic.torch import vectors
from mechanic.torch.checkpoint import DELTA, RESIDUAL
from mechanic.torch.groups import Group, rows_of
from mechanic.torch.shards import Reduction, cut_grad_as_parameter, dtensor_class, locals_of, set_local
from mechanic.torch.vectors import is_half_precision


def own_state(p: Tensor, state: dict[str, Tensor], *, frozen: bool) -> dict[str, Tensor]:
    """What Mechanic keeps of a parameter, taken from its state or made anew: Delta, and a residual if it needs one."""
    dtypes = {} if frozen else {DELTA: vectors.working_dtype(p.dtype)}
    if is_half_precision(p.dtype):
        dtypes[RESIDUAL] = vectors.RESIDUAL_DTYPE
    return {
        key: state[key].to(dtype) if key in state else torch.zeros_like(p, dtype=dtype) for key, dtype in dtypes.items()
    }


@contextmanager
def widened(params: Iterable[Tensor]) -> Iterator[None]:
    """Let half-precision parameters pass for float32, which the base steps on: torch casts loaded state to match."""
    kept = [(p, p.data, p.grad) for p in params if is_half_precision(p.dtype)]
    try:
        for p, data, _ in kept:
            _repoint(p, torch.empty(0, dtype=vectors.working_dtype(data.dtype), device=data.device), None)
        yield
    finally:
        for p, data, grad in kept:
            _repoint(p, data, grad)


@dataclass
class Bucket:
    """Trainable parameters that can be worked on as one list.

    The base never steps on the parameters themselves but on working copies in at least float32: the parameters
    are lent out under the same identity and taken back. So a base that fails has not touched them, and what it
    means is not lost in the rounding of a half-precision parameter. Such parameters carry a residual, what
    rounding cut off, so that steps smaller than their last bit add up instead of vanishing.

    A base that does not look at the values it steps on needs no copies: Delta itself is lent.
    """

    row: int  # of the tuner
    sign: float  # -1 where the base ascends
    weight: float  # of what this rank holds in the sum over ranks
    device: torch.device
    dtype: torch.dtype
    sharded: bool  # DTensors
    has_grad: bool
    moves: bool  # by its gradient, or by a Delta from earlier ones
    decay: float = 0.0  # the share of x that a base which is lent Delta would take by weight decay
    lead: Tensor | None = None  # 1 - S, by which the base's own iterates are ahead of the parameters along Delta
    work: Any = vectors  # the functions to work with: compiled.py has the same
    lends_delta_at: Tensor | None = None  # S, [tuners], where the base is to step on Delta itself
    kept: Tensor | None = None  # the share of Delta that outlives this step, [tuners]; None is all of it
    params: list[Tensor] = field(default_factory=list)
    own: list[dict[str, Tensor]] = field(default_factory=list)  # what Mechanic keeps of each, see own_state
    _lent: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # their own data and gradient meanwhile

    @property
    def deltas(self) -> list[Tensor]:
        return locals_of([own[DELTA] for own in self.own if own], sharded=self.sharded)

    @property
    def residuals(self) -> list[Tensor]:
        return [own[RESIDUAL] for own in self.own]

    def measure(self) -> Tensor:
        """The five sums, [5], of what this rank holds."""
        sums: Tensor = self.work.measure(self._local_params(), self._grads(), self.deltas, self.sign, self.device)
        return sums * self.weight

    def grad_sq(self) -> Tensor:
        """|g|^2, [1], of what this rank holds."""
        grads = self._grads()
        return vectors.dot(grads, grads, self.device).reshape(1) * self.weight

    def discard_grads_unless(self, finite: Tensor) -> None:
        """Zero the gradients where the flag of their tuner is down, [tuners] of bool: the base must not see them."""
        flag = self._own(finite)
        if vectors.is_at_hand(flag) and flag:
            return
        if not self.sharded:
            for p in self.params:
                if p.grad is not None and not vectors.can_be_cleared(p.grad):
                    p.grad = p.grad.clone().resolve_neg().resolve_conj().contiguous()
        vectors.clear_unless(flag, self._grads())

    def lend(self) -> None:
        """Point the parameters at what the base is to step on: working copies, or Delta itself."""
        if self.lends_delta_at is not None:
            # All that matters is what it adds to Delta; the parameters wait at x_1 for S' Delta'.
            scale, kept = self._scalar(self.lends_delta_at), None if self.kept is None else self._scalar(self.kept)
            self.work.retreat(self._local_params(), self.deltas, scale, self.decay, kept)
            lent = self.deltas
        else:
            lent = self._values(copy=True)
        if self.lead is not None:
            vectors.rescale(lent, self.deltas, self._scalar(self.lead))
        is_half = is_half_precision(self.dtype)
        for p, data, tensor in zip(self.params, self._data(), lent, strict=True):
            grad = p.grad if is_half else None
            self._lent.append((data, grad))
            _repoint(p, tensor, None if grad is None else grad.to(tensor.dtype))

    def take_back(self) -> list[Tensor]:
        """Point the parameters at their own data again; returns what they were pointed at, as the base left it."""
        stepped = self._data() if self._lent else []
        for p, (data, grad) in zip(self.params, self._lent, strict=False):
            _repoint(p, data, grad)
        self._lent = []
        return stepped

    def give_up(self, stepped: list[Tensor], forgotten: set[Tensor]) -> None:
        """The base has failed: bring parameters and Delta back to where they were.

        What the base did to copies is lost. What it may have added to Delta already stays in it, at the S of before,
        as a bare optimizer that fails halfway has moved some of its parameters. The Delta of ``forgotten`` parameters
        was 0 and is not kept, so they are where they were.
        """
        if stepped and self.lends_delta_at is not None:
            scale, kept = self._scalar(self.lends_delta_at), None if self.kept is None else self._scalar(self.kept)
            lists = zip(self.params, self._local_params(), self.deltas, strict=True)
            remembered = [(x, delta) for p, x, delta in lists if p not in forgotten]
            if remembered:
                values, deltas = (list(tensors) for tensors in zip(*remembered, strict=True))
                vectors.undo_retreat(values, deltas, scale, self.decay, kept)

    def move(self, stepped: list[Tensor], scale: Tensor, new_scale: Tensor) -> None:
        """Scale what the base did, with S and S', [tuners]."""
        if not self.moves:
            return
        values = self._values()
        if stepped and self.lends_delta_at is not None:
            vectors.rescale(values, self.deltas, self._scalar(new_scale))
            return
        if stepped and self.lead is not None:
            vectors.rescale(stepped, self.deltas, -self._scalar(self.lead))
        kept = None
        if self.kept is not None:
            # x' = x + S' Delta' - S Delta stays as it is when Delta shrinks and S grows by as much.
            scale, kept = scale / self.kept, self._scalar(self.kept)
        change = self._scalar(new_scale - scale)
        if stepped:
            self.work.combine(values, stepped, self.deltas, self._scalar(scale), change, kept)
        else:
            if kept is not None:
                torch._foreach_mul_(self.deltas, kept)
            vectors.rescale(values, self.deltas, change)
        self._store(values)

    def move_frozen(self, stepped: list[Tensor], scale: Tensor | None) -> None:
        """Take over what the base did, scaled by a fixed S, [tuners]; None where the base has applied it already."""
        values = self._values()
        vectors.interpolate(values, stepped, None if scale is None else self._scalar(scale))
        self._store(values)

    def _local_params(self) -> list[Tensor]:
        return locals_of(self.params, sharded=self.sharded)

    def _data(self) -> list[Tensor]:
        """What :func:`set_local` puts back."""
        return self._local_params() if self.sharded else [p.data for p in self.params]

    def _grads(self) -> list[Tensor]:
        return locals_of([p.grad for p in self.params if p.grad is not None], sharded=self.sharded)

    def _values(self, *, copy: bool = False) -> list[Tensor]:
        if is_half_precision(self.dtype):
            return vectors.with_residuals(self.params, self.residuals)
        params = self._local_params()
        return [p.clone() for p in params] if copy else params

    def _store(self, values: list[Tensor]) -> None:
        if is_half_precision(self.dtype):
            vectors.store_rounded(values, self.params, self.residuals)

    def _own(self, per_tuner: Tensor) -> Tensor:
        return per_tuner.unbind()[self.row].to(self.device)

    def _scalar(self, per_tuner: Tensor) -> Tensor:
        return self._own(per_tuner).to(vectors.working_dtype(self.dtype).to_real())


def _repoint(p: Tensor, data: Tensor, grad: Tensor | None) -> None:
    """Let a parameter hold other data. In another dtype the gradient, which has to agree, goes with it."""
    if p.dtype == data.dtype:
        set_local(p, data)
    else:
        p.grad = None
        p.data = data
        p.grad = grad


def buckets_of(
    groups: list[Group], state: Any, reduction: Reduction, *, frozen: bool, ascends: bool, decays: list[float] | None
) -> list[Bucket]:
    """The trainable parameters with what Mechanic keeps of them, in lists that can be worked on as one."""
    buckets: dict[tuple[Any, ...], Bucket] = {}
    rows = rows_of(groups)
    dtensor = dtensor_class()
    for group, decay in zip(groups, decays or [0.0] * len(groups), strict=True):
        row, sign = rows[group["mechanic_row"]], -1.0 if group.get("maximize", ascends) else 1.0
        for p in group["params"]:
            if not p.requires_grad:
                continue
            grad = p.grad
            if grad is not None and grad.layout != torch.strided:
                raise ValueError(
                    f"Mechanic needs dense gradients, got one of layout {grad.layout}; "
                    "build the embedding with sparse=False"
                )
            sharded = dtensor is not None and isinstance(p, dtensor)
            if sharded:
                cut_grad_as_parameter(p)
            kept = state.get(p, {})
            has_grad = grad is not None
            # Nothing is kept of a parameter that never had a gradient: it has not moved, and will not now.
            moves = has_grad or DELTA in kept
            if DELTA in kept and kept[DELTA].shape != p.shape:
                raise ValueError(
                    f"a parameter has shape {tuple(p.shape)} now, and its state 'mechanic_delta' still "
                    f"{tuple(kept[DELTA].shape)}; where parameters are resized in mid-training, resize all tensors of "
                    "optimizer.state[p] with them, with zeros for new elements of 'mechanic_delta'"
                )
            key = (row, sign, reduction.weight(p), p.device, p.dtype, sharded, has_grad, moves, decay)
            if (bucket := buckets.get(key)) is None:
                bucket = buckets[key] = Bucket(*key)
            bucket.params.append(p)
            bucket.own.append(own_state(p, kept, frozen=frozen) if moves else {})
    return list(buckets.values())
