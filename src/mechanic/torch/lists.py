"""The work that grows with the model, on lists of tensors: the five sums, and the move to the next Delta.

Lists are of equal length and shapes. S, S' and all other factors are 0-dim tensors on the device of the lists, so a
step never waits for the device. On a CPU the work is done in pieces that stay in the cache of a core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from mechanic.torch.delta import CUT, RESIDUAL_DTYPE, Noise, Stored, decode, encode, flat_of, working_dtype
from mechanic.torch.private import flatten, foreach_add_, foreach_addcmul_, foreach_copy_, foreach_mul, foreach_mul_

ON_CPU = 1 << 17
"""Elements that a CPU works on at a time. A multiple of :data:`mechanic.torch.delta.ROW`."""

LONG = 1 << 22
"""On other devices tensors of so many elements are not joined for a sum: the copy takes longer than the launches."""

LONGEST, LONGEST_ON_CPU = 1 << 24, 1 << 20
"""Elements of one inner product. A longer one loses digits in float32."""

ALIGNED = 64
"""Copies of small tensors begin at multiples of so many elements, as kernels for vectors want it."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Factors(NamedTuple):
    """What a step does with the parameters of one tuner; 0-dim tensors on their device."""

    finite: Tensor | None  # 1 if the gradients are, else 0; without it the base gets them as they are
    noise: Noise  # for Deltas in fewer bits
    to_own: Tensor  # 1 - S: the base's own iterates are at x_1 + Delta, the parameters at x_1 + S Delta
    of_update: Tensor  # S / k
    of_delta: Tensor  # S' - S / k
    retention: Tensor | None = None  # k, the share of Delta that is kept; None means k = 1


FactorsOf = Callable[[int, torch.device, torch.dtype], Factors]
"""The factors by the row of a tuner, and the device and the dtype of parameters."""


def factors_of_step(
    before: Tensor, after: Tensor, counts: Tensor, retention: Tensor | None = None, finite: Tensor | None = None
) -> FactorsOf:
    """From S ``before`` a step to S ``after`` it, each [tuners], as are k and whether gradients are finite.

    ``counts``, [tuners, n], are the number of the step, which Deltas in fewer bits are rounded by.
    """
    ratio = before if retention is None else before / retention
    numbers = [1 - before, ratio, after - ratio]
    stacked = torch.stack(numbers if retention is None else [*numbers, retention])

    @cache
    def factors(row: int, device: torch.device, dtype: torch.dtype) -> Factors:
        flag = None if finite is None else finite.unbind()[row].to(device, INTEGERS[dtype.to_real().itemsize])
        noise = Noise(counts.unbind()[row].unbind()[0], device)
        return Factors(flag, noise, *stacked.to(device, working_dtype(dtype).to_real()).unbind(1)[row].unbind())

    return factors


class Start(NamedTuple):
    """Where the base stands before its step, where it goes, and what it leaves out."""

    at: str  # "x", "own" for x_1 + Delta, "zero" if its update depends on the gradient alone
    dtype: torch.dtype
    sign: float = 1.0  # -1 if the base ascends
    decay: float = 0.0  # lr times weight decay, which a base that stands at zero does not apply


def five_sums(params: list[Tensor], grads: list[Tensor], deltas: list[Stored], dtype: torch.dtype) -> Tensor:
    """The sums of :data:`mechanic.tuner.SUMS` over parameters on one device, [5], added up in a dtype.

    Lists may be empty, but not all; what is not there counts as zero.
    """
    lead = params or grads
    wide = working_dtype(lead[0].dtype)
    products: list[Tensor] = []
    for stored, (x, g) in _pieces(deltas, params, grads):
        d = [delta.codes if delta.scales is None else decode(delta) for delta in stored]
        for xs, gs, ds in zip_longest(*(_joined(tensors, wide) for tensors in (x, g, d))):
            pairs = (ds, gs), (ds, xs), (gs, gs), (xs, xs), (ds, ds)
            some = gs if xs is None else xs
            products += [some.new_zeros(()) if a is None or b is None else torch.dot(a, b) for a, b in pairs]
    if not products:
        return torch.zeros(5, dtype=dtype, device=lead[0].device)
    return torch.stack(products).to(dtype).view(-1, 5).sum(0)


def move(
    params: list[Tensor],
    residuals: list[Tensor],
    deltas: list[Stored],
    stepped: list[Tensor],
    start: Start,
    factors: Factors,
) -> None:
    """From x_1 + S Delta to x_1 + S' Delta', where Delta' = k Delta + u and u is what the base did.

    ``stepped`` is what the base left where it started from, and is overwritten; it is empty if the base did not step.
    x' = x + S/k u + (S' - S/k) Delta' needs no x_1, and keeps what others did to the parameters between steps.
    ``deltas`` are empty if S is frozen: x' = x + S u. All is made in temporary tensors first, and one call then writes
    all parameters, so that nothing can come between two parts of one.
    """
    k, coded, halved = factors.retention, _are_coded(deltas, params), bool(residuals)
    wide = working_dtype(params[0].dtype)
    made = stepped  # of the parameters: what is added to them, or in half precision what they become
    if halved or (coded and not stepped):
        made = [torch.empty_like(p, dtype=p.dtype if halved else wide) for p in params]
    lists = params, residuals, stepped, made
    in_pieces = coded or params[0].device.type == "cpu"
    for stored, (x, residual, u, m) in _pieces(deltas, *lists) if in_pieces else [(deltas, lists)]:
        values = values_of(x, residual) if halved else x
        flat, d = _decoded(stored, wide)
        u = packed(u, u, wide)[1] if flat is not None and u and u[0].dtype != wide else [each.to(wide) for each in u]
        if u and start.at == "own":
            add_scaled(u, d, -factors.to_own)
        if u and (part := start.decay if start.at == "zero" else 1.0):
            foreach_add_(u, values, alpha=-part)
        if d and k is not None:
            foreach_mul_(d, k)
        if d and u:
            foreach_add_(d, u)
        if halved:
            for each, factor in ((u, factors.of_update), (d, factors.of_delta)):
                if each:
                    add_scaled(values, each, factor)
            round_into(m, residual, values)
        elif d and u:
            foreach_mul_(u, factors.of_update)
            add_scaled(u, d, factors.of_delta)
        elif coded:
            foreach_copy_(m, foreach_mul(d, factors.of_delta))
        if coded and (u or k is not None):
            if not u and k is not None and (scales := stored[0].scales) is not None:
                scales.mul_(k)  # which multiplies all elements of a block, without rounding
            elif flat is not None:
                _encode_together(flat, d, stored, factors.noise)
            else:
                encode(d[0], stored[0], factors.noise)
    if halved:
        foreach_copy_(params, made)
    elif made and deltas:
        foreach_add_(params, made)
    else:  # one of the two
        codes = [delta.codes for delta in deltas]
        add_scaled(params, made or codes, factors.of_update if made else factors.of_delta)


def add_scaled(values: list[Tensor], directions: list[Tensor], factor: Tensor) -> None:
    """x <- x + factor d."""
    foreach_addcmul_(values, [factor] * len(values), directions)


def packed(tensors: list[Tensor] | None, like: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Copies of tensors, or zeros: a flat tensor, and views of it with the shapes and the memory order of others.

    The gaps between the views hold anything.
    """
    ends = list(accumulate((-(-tensor.numel() // ALIGNED) * ALIGNED for tensor in like), initial=0))
    flat = torch.empty(ends[-1], dtype=dtype, device=like[0].device)
    dense = [tensor if flat_views([tensor]) else torch.empty(tensor.shape, device="meta") for tensor in like]
    views = [flat.as_strided(each.shape, each.stride(), first) for each, first in zip(dense, ends, strict=False)]
    if tensors is None:
        flat.zero_()
    else:
        foreach_copy_(views, tensors)
    return flat, views


def flat_views(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Flat views of tensors of one shape with the same order of elements; None if their memory has none."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        order = sorted(range(tensors[0].ndim), key=tensors[0].stride, reverse=True)
        tensors = [tensor.permute(order) for tensor in tensors]
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
    return [tensor.view(-1) for tensor in tensors]


def is_on_host(tensor: Tensor) -> bool:
    """Whether its values can be read without waiting for a device."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def cleared_unless(finite: Tensor, grads: list[Tensor]) -> list[Tensor]:
    """The gradients, or zeros in their place if the flag, 0-dim, is 0."""
    if is_on_host(finite):
        return grads if finite else [torch.zeros_like(grad) for grad in grads]
    # As integers, since infinity times zero is not zero.
    real = [torch.view_as_real(g) if g.is_complex() else g for g in (g.resolve_conj().resolve_neg() for g in grads)]
    integers = [r.view(INTEGERS[r.itemsize]) for r in real]
    kept = foreach_mul(integers, finite)
    cleared = [k.view(r.dtype) for k, r in zip(kept, real, strict=True)]
    return [torch.view_as_complex(c) if g.is_complex() else c for c, g in zip(cleared, grads, strict=True)]


def values_of(params: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
    """The values that half-precision parameters stand for, in float32: what is stored plus what rounding cut off."""
    flat, values = packed(residuals, params, torch.float32)
    wide, _ = packed(params, params, torch.float32)
    flat.add_(wide)
    # If the sum rounds to something else, somebody has written to the parameter since. Then p is the value.
    if is_on_host(flat) and all(torch.equal(v.to(p.dtype), p) for v, p in zip(values, params, strict=True)):
        return values
    torch.where(flat.to(params[0].dtype) == wide, flat, wide, out=flat)
    return values


def round_into(rounded: list[Tensor], residuals: list[Tensor], values: list[Tensor]) -> None:
    """Round float32 values to half precision and keep what that cuts off. ``values`` is overwritten."""
    foreach_copy_(rounded, values)
    wide, wide_views = packed(rounded, rounded, torch.float32)
    foreach_add_(values, wide_views, alpha=-1)
    foreach_copy_(residuals, values)
    # A residual rounded up to half of the parameter's last bit would look like somebody's write.
    rest, rest_views = packed(residuals, rounded, torch.float32)
    again = torch.add(rest, wide).to(rounded[0].dtype)
    smaller = rest * (1 - torch.finfo(RESIDUAL_DTYPE).eps)
    torch.where(again != wide, smaller, rest, out=rest)
    foreach_copy_(residuals, rest_views)


def _are_joined(deltas: list[Stored], wide: torch.dtype) -> bool:
    """Whether Deltas are kept in bfloat16 for float32, and so are decoded and rounded together."""
    return bool(deltas) and deltas[0].codes.dtype == torch.bfloat16 and wide == torch.float32


def _decoded(deltas: list[Stored], wide: torch.dtype) -> tuple[Tensor | None, list[Tensor]]:
    """The values of Deltas, and the flat tensor that they are in if several were decoded together."""
    if len(deltas) > 1 and _are_joined(deltas, wide):
        codes = [delta.codes for delta in deltas]
        return packed(codes, codes, wide)
    return None, [decode(delta, wide) for delta in deltas]


def _encode_together(flat: Tensor, values: list[Tensor], deltas: list[Stored], noise: Noise) -> None:
    """Round values in float32 into bfloat16, as :func:`encode` does one. They are views of ``flat``, which changes."""
    foreach_add_([flat_of(each).view(torch.int32) for each in values], [noise.low_bits(delta) for delta in deltas])
    flat.view(torch.int32).bitwise_and_(-CUT)
    foreach_copy_([delta.codes for delta in deltas], values)


def _are_coded(deltas: list[Stored], params: list[Tensor]) -> bool:
    """Whether Deltas have to be decoded."""
    return bool(deltas) and deltas[0].codes.dtype != working_dtype(params[0].dtype)


def _pieces(deltas: list[Stored], *lists: list[Tensor]) -> Iterator[tuple[list[Stored], tuple[list[Tensor], ...]]]:
    """Cut Deltas and lists of equal shapes at the same places. Some of them may be empty.

    Long tensors are cut into views. Short ones are taken together, since for them a call costs more than the work,
    unless Deltas are in int8.
    """
    lead = next(tensors for tensors in lists if tensors)
    codes = [delta.codes for delta in deltas]
    alone = _are_coded(deltas, lead) and not _are_joined(deltas, working_dtype(lead[0].dtype))
    long, longest = (ON_CPU, ON_CPU) if lead[0].device.type == "cpu" else (LONG, LONGEST)
    waiting: list[int] = []
    size = 0

    def chosen() -> tuple[list[Stored], tuple[list[Tensor], ...]]:
        return [deltas[i] for i in waiting if deltas], tuple([each[i] for i in waiting if each] for each in lists)

    for index, tensor in enumerate(lead):
        elements = tensor.numel()
        if not elements:
            continue
        if elements < long and not alone:
            if size + elements > longest:
                yield chosen()
                waiting, size = [], 0
            waiting.append(index)
            size += elements
        else:
            present = [tensors[index] for tensors in (codes, *lists) if tensors]
            views = flat_views(present)
            cut = [(t,) for t in present] if views is None else [torch.split(view, longest) for view in views]
            for number, row in enumerate(zip(*cut, strict=True)):
                piece = iter(row)
                stored = [deltas[index].part(next(piece), number * longest)] if deltas else []
                yield stored, tuple([next(piece)] if tensors else [] for tensors in lists)
    if waiting:
        yield chosen()


def _joined(tensors: list[Tensor], wide: torch.dtype) -> Sequence[Tensor]:
    """Tensors as one flat real tensor in the working dtype, cut for inner products; nothing if there are none."""
    if not tensors:
        return ()
    joined = tensors[0].reshape(-1) if len(tensors) == 1 else flatten(tensors)
    joined = joined.resolve_conj().to(wide)
    joined = torch.view_as_real(joined).reshape(-1) if joined.is_complex() else joined
    return torch.split(joined, LONGEST_ON_CPU if joined.device.type == "cpu" else LONGEST)
