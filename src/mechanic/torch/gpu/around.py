"""The kernels around a base that steps by itself: before it steps, and after.

A base that does not look at the values it steps on is lent Delta itself: LENDS_DELTA. Any other steps on copies in
float32. If it keeps iterates of its own, OFFSET, the copies are at x_1 + Delta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic.torch.gpu.access import _list, _load, _store, _store_value, _value
from mechanic.torch.gpu.programs import (
    AFTER,
    BEFORE,
    CHANGE,
    DECAY,
    FINITE,
    NUMBERS,
    NUMBERS_ROW,
    RECORD,
    RETENTION,
    SCALE,
    TUNED,
    TUNER,
    D,
    G,
    M,
    R,
    V,
    X,
    _count,
    _count_in,
    _number,
    _record,
    _start,
    _whole,
)


@triton.jit
def _lend_block(
    i, mask, x, g, d, m, v, r, S, kept, decay, finite, XT: tl.constexpr, HALF: tl.constexpr,
    LENDS_DELTA: tl.constexpr, OFFSET: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    a = _value(x, r, i, mask, XT, HALF, MASKED)
    if LENDS_DELTA:
        c = _load(d, i, mask, MASKED)
        _store(x, i, a - S * c, mask, MASKED)
        _store(d, i, kept * c - decay * a, mask, MASKED)
    else:
        if OFFSET:
            a += (1 - S) * _load(d, i, mask, MASKED)
        _store(m, i, a, mask, MASKED)
        if HALF:
            b = _load(g, i, mask, MASKED).to(tl.float32)
            _store(v, i, tl.where(finite != 0, b, 0.0), mask, MASKED)


@triton.jit(do_not_specialize=["T"])
def lend(
    words, where, tuned, T, LENDS_DELTA: tl.constexpr, OFFSET: tl.constexpr, XT: tl.constexpr, GT: tl.constexpr,
    HALF: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Prepare what the base is to step on, and zero the gradients unless they are finite."""
    record = _record(words, where)
    if tl.load(record + G) != 0:
        start = _start(where, CHUNK)
        count = _count(record, start, CHUNK)
        whole = _whole(record, count, BLOCK)
        x = _list(record, X, start, XT)
        g = _list(record, G, start, GT)
        d = _list(record, D, start, tl.float32)
        m = _list(record, M, start, tl.float32)
        v = _list(record, V, start, tl.float32)
        r = _list(record, R, start, tl.bfloat16)
        of_tuner = tuned + tl.load(record + TUNER) * TUNED
        S = tl.load(of_tuner + BEFORE).to(tl.float32)
        kept = tl.load(of_tuner + RETENTION).to(tl.float32)
        finite = tl.load(of_tuner + FINITE).to(tl.float32)
        row = words + T.to(tl.int64) * RECORD + tl.load(record + NUMBERS) * NUMBERS_ROW
        decay = _number(row, DECAY).to(tl.float32)
        lane = tl.arange(0, BLOCK)
        for o in range(0, whole, BLOCK):
            _lend_block(
                o + lane, None, x, g, d, m, v, r, S, kept, decay, finite, XT, HALF, LENDS_DELTA, OFFSET, False
            )  # fmt: skip
        few = tl.arange(0, SMALL)
        for o in range(whole, count, SMALL):
            _lend_block(
                o + few, o + few < count, x, g, d, m, v, r, S, kept, decay, finite, XT, HALF, LENDS_DELTA, OFFSET, True
            )  # fmt: skip
        if finite == 0:
            for o in range(0, count, SMALL):
                tl.store(g + o + few, tl.zeros([SMALL], GT), o + few < count)


@triton.jit
def _move_block(
    i, mask, present, x, d, m, r, S, change, kept, before, after, XT: tl.constexpr, HALF: tl.constexpr,
    LENDS_DELTA: tl.constexpr, OFFSET: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    a = _value(x, r, i, mask, XT, HALF, MASKED)
    c = _load(d, i, mask, MASKED)
    if LENDS_DELTA:
        new_delta = c
        moved = a + after * c
        if MASKED:  # a tensor without a gradient was not lent
            new_delta = tl.where(present, c, kept * c)
            moved = tl.where(present, moved, a + change * new_delta)
            _store(d, i, new_delta, mask, True)
    else:
        u = _load(m, i, present, MASKED) - a
        if OFFSET:
            u -= (1 - before) * c
        if MASKED:
            u = tl.where(present, u, 0.0)
        new_delta = kept * c + u
        moved = a + S * u + change * new_delta
        _store(d, i, new_delta, mask, MASKED)
    _store_value(x, r, i, moved, mask, XT, HALF, MASKED)


@triton.jit(do_not_specialize=["T"])
def move(
    words, where, tuned, T, LENDS_DELTA: tl.constexpr, OFFSET: tl.constexpr, XT: tl.constexpr, GT: tl.constexpr,
    HALF: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """x <- x + S' Delta' - S Delta, and Delta' where the base stepped on copies or not at all."""
    record = _record(words, where)
    if tl.load(record + D) != 0:
        start = _start(where, CHUNK)
        count = _count(record, start, CHUNK)
        whole = _whole(record, count, BLOCK)
        x = _list(record, X, start, XT)
        d = _list(record, D, start, tl.float32)
        m = _list(record, M, start, tl.float32)
        r = _list(record, R, start, tl.bfloat16)
        of_tuner = tuned + tl.load(record + TUNER) * TUNED
        S = tl.load(of_tuner + SCALE).to(tl.float32)
        change = tl.load(of_tuner + CHANGE).to(tl.float32)
        kept = tl.load(of_tuner + RETENTION).to(tl.float32)
        before = tl.load(of_tuner + BEFORE).to(tl.float32)
        after = tl.load(of_tuner + AFTER).to(tl.float32)
        lane = tl.arange(0, BLOCK)
        for o in range(0, whole, BLOCK):
            _move_block(
                o + lane, None, None, x, d, m, r, S, change, kept, before, after, XT, HALF, LENDS_DELTA, OFFSET, False
            )  # fmt: skip
        few = tl.arange(0, SMALL)
        with_g = _count_in(record, G, count)
        for o in range(whole, count, SMALL):
            i = o + few
            _move_block(
                i, i < count, i < with_g, x, d, m, r, S, change, kept, before, after, XT, HALF,
                LENDS_DELTA, OFFSET, True,
            )  # fmt: skip
