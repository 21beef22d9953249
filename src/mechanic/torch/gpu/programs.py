"""The kernels, in Triton. Imported with the first launch.

One program works on one chunk of one tensor and finds it in the table of :mod:`mechanic.torch.gpu.columns`. Whole
blocks of aligned tensors take 16-byte accesses without masks. What is left over, and tensors that lack a gradient, an
alignment or a Delta, take small masked blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mechanic.torch.gpu import columns
from mechanic.torch.gpu.access import _list, _load, _narrow, _store, _store_value, _value
from mechanic.torch.gpu.encoding import SHARING, _load_delta, _store_rounded

X = tl.constexpr(columns.X)
G = tl.constexpr(columns.G)
D = tl.constexpr(columns.D)
M = tl.constexpr(columns.M)
V = tl.constexpr(columns.V)
R = tl.constexpr(columns.R)
DELTA_SCALES = tl.constexpr(columns.DELTA_SCALES)
STEP = tl.constexpr(columns.STEP)
NUMEL = tl.constexpr(columns.NUMEL)
TUNER = tl.constexpr(columns.TUNER)
NUMBERS = tl.constexpr(columns.NUMBERS)
QUICK = tl.constexpr(columns.QUICK)
PLACE = tl.constexpr(columns.PLACE)
RECORD = tl.constexpr(columns.RECORD)
SIGN = tl.constexpr(columns.SIGN)
WEIGHT = tl.constexpr(columns.WEIGHT)
LR = tl.constexpr(columns.LR)
LR_AT = tl.constexpr(columns.LR_AT)
DECAY = tl.constexpr(columns.DECAY)
L2 = tl.constexpr(columns.L2)
OWN = tl.constexpr(columns.OWN)
NUMBERS_ROW = tl.constexpr(columns.NUMBERS_ROW)
SCALE = tl.constexpr(columns.SCALE)
CHANGE = tl.constexpr(columns.CHANGE)
RETENTION = tl.constexpr(columns.RETENTION)
FINITE = tl.constexpr(columns.FINITE)
BEFORE = tl.constexpr(columns.BEFORE)
AFTER = tl.constexpr(columns.AFTER)
STEPS = tl.constexpr(columns.STEPS)
TUNED = tl.constexpr(columns.TUNED)
SGD = tl.constexpr(columns.SGD)
MOMENTUM = tl.constexpr(columns.MOMENTUM)
ADAM = tl.constexpr(columns.ADAM)
NADAM = tl.constexpr(columns.NADAM)
LION = tl.constexpr(columns.LION)
RMSPROP = tl.constexpr(columns.RMSPROP)
RMSPROP_MOMENTUM = tl.constexpr(columns.RMSPROP_MOMENTUM)
ADAGRAD = tl.constexpr(columns.ADAGRAD)

# Where in its tensor a program is.


@triton.jit
def _record(words, where):
    return words + tl.load(where + 2 * tl.program_id(0)).to(tl.int64) * RECORD


@triton.jit
def _start(where, CHUNK: tl.constexpr):
    return tl.load(where + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK


@triton.jit
def _count(record, start, CHUNK: tl.constexpr):
    return tl.minimum(tl.load(record + NUMEL) - start, CHUNK).to(tl.int32)


@triton.jit
def _count_in(record, column: tl.constexpr, count):
    """The same in a list that the tensor may not have."""
    return tl.where(tl.load(record + column) != 0, count, 0)


@triton.jit
def _whole(record, count, BLOCK: tl.constexpr):
    """How many of the elements are in blocks that need no mask."""
    return tl.where(tl.load(record + QUICK) != 0, count // BLOCK * BLOCK, 0)


@triton.jit
def _number(row, column: tl.constexpr):
    return tl.load(row + column).to(tl.float64, bitcast=True)


# The five sums.


@triton.jit(do_not_specialize=["T"])
def five_sums(
    words, where, parts, T, XT: tl.constexpr, GT: tl.constexpr, DT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """The columns of :data:`mechanic.tuner.SUMS` of every chunk, weighted; parts [programs, 5] float64."""
    record = _record(words, where)
    start = _start(where, CHUNK)
    count = _count(record, start, CHUNK)
    whole = _whole(record, count, BLOCK)
    x = _list(record, X, start, XT)
    g = _list(record, G, start, GT)
    d = _list(record, D, start, DT)
    scales = _list(record, DELTA_SCALES, start // SHARING, tl.float32)
    lane = tl.arange(0, BLOCK)
    s0 = tl.zeros([BLOCK], tl.float32)
    s1, s2, s3, s4 = s0, s0, s0, s0
    for o in range(0, whole, BLOCK):
        a = _load(x, o + lane, None, False).to(tl.float32)
        b = _load(g, o + lane, None, False).to(tl.float32)
        c = _load_delta(d, scales, o, None, 0, BLOCK, DT, False)
        s0 += c * b
        s1 += c * a
        s2 += b * b
        s3 += a * a
        s4 += c * c
    r0, r1, r2, r3, r4 = tl.sum(s0, 0), tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0), tl.sum(s4, 0)
    few = tl.arange(0, SMALL)
    with_g = _count_in(record, G, count)
    with_d = _count_in(record, D, count)
    t0 = tl.zeros([SMALL], tl.float32)
    t1, t2, t3, t4 = t0, t0, t0, t0
    for o in range(whole, count, SMALL):
        i = o + few
        a = _load(x, i, i < count, True).to(tl.float32)
        b = _load(g, i, i < with_g, True).to(tl.float32)
        c = _load_delta(d, scales, o, i < with_d, with_d, SMALL, DT, True)
        t0 += c * b
        t1 += c * a
        t2 += b * b
        t3 += a * a
        t4 += c * c
    row = words + T.to(tl.int64) * RECORD + tl.load(record + NUMBERS) * NUMBERS_ROW
    weight = _number(row, WEIGHT)
    out = parts + tl.program_id(0).to(tl.int64) * 5
    tl.store(out, (r0 + tl.sum(t0, 0)).to(tl.float64) * weight * _number(row, SIGN))
    tl.store(out + 1, (r1 + tl.sum(t1, 0)).to(tl.float64) * weight)
    tl.store(out + 2, (r2 + tl.sum(t2, 0)).to(tl.float64) * weight)
    tl.store(out + 3, (r3 + tl.sum(t3, 0)).to(tl.float64) * weight)
    tl.store(out + 4, (r4 + tl.sum(t4, 0)).to(tl.float64) * weight)


# The base's step and Mechanic's in one.


@triton.jit
def _rule(RULE: tl.constexpr, x, g, m, v, l2, n0, n1, n2, n3, n4, n5, n6, n7):
    """The base's update u before lr and a decoupled weight decay, and what it keeps."""
    g = g + l2 * x
    if RULE == SGD:
        u = g
    elif RULE == MOMENTUM:  # n: momentum, 1 - dampening, how much of g and of the buffer is taken
        m = n0 * m + n1 * g
        u = n2 * g + n3 * m
    elif RULE == LION:  # n: beta1, 1 - beta1, beta2, 1 - beta2
        c = n0 * m + n1 * g
        u = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, 0.0))
        m = n2 * m + n3 * g
    elif RULE == ADAGRAD:  # n: eps
        m = m + g * g
        u = g / (tl.sqrt(m) + n0)
    elif RULE == RMSPROP:  # n: alpha, 1 - alpha, eps
        m = n0 * m + n1 * g * g
        u = g / (tl.sqrt(m) + n2)
    elif RULE == RMSPROP_MOMENTUM:  # n: alpha, 1 - alpha, eps, momentum
        m = n0 * m + n1 * g * g
        v = n3 * v + g / (tl.sqrt(m) + n2)
        u = v
    else:
        m = n0 * m + n1 * g  # n: beta1, 1 - beta1, beta2, 1 - beta2, eps, then
        v = n2 * v + n3 * g * g
        if RULE == ADAM:  # the corrections of m and sqrt(v)
            u = n5 * m / (n6 * tl.sqrt(v) + n4)
        else:  # NAdam: the factor of g, the correction of sqrt(v), the factor of m
            u = (n5 * g + n7 * m) / (n6 * tl.sqrt(v) + n4)
    return u, m, v


@triton.jit
def _step_block(
    o, mask, present, count, x, g, d, scales, m, v, r, start, place, steps, S, change, kept, finite, sign, lr, decay,
    l2, n0, n1, n2, n3, n4, n5, n6, n7, RULE: tl.constexpr, SLOTS: tl.constexpr, XT: tl.constexpr, DT: tl.constexpr,
    BT: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    i = o + tl.arange(0, N)
    a = _value(x, r, i, mask, XT, HALF, MASKED)
    b = _load(g, i, present, MASKED).to(tl.float32)
    b = tl.where(finite != 0, sign * b, 0.0)
    c = _load_delta(d, scales, o, mask, count, N, DT, MASKED)
    m0, v0 = a, a
    if SLOTS >= 1:
        m0 = _load(m, i, present, MASKED).to(tl.float32)
    if SLOTS >= 2:
        v0 = _load(v, i, present, MASKED).to(tl.float32)
    u, m1, v1 = _rule(RULE, a, b, m0, v0, l2, n0, n1, n2, n3, n4, n5, n6, n7)
    if BT == tl.float32:
        u = -lr * (decay * a + u)
    else:  # the base steps on zeros in this dtype
        u = _narrow(-lr * u, BT).to(tl.float32) - lr * decay * a
    if MASKED:
        u = tl.where(present, u, 0.0)
    c = kept * c + u
    _store_value(x, r, i, a + S * u + change * c, mask, XT, HALF, MASKED)
    if DT == tl.float32:
        _store(d, i, c, mask, MASKED)
    if SLOTS >= 1:
        _store(m, i, _narrow(m1, BT), present, MASKED)
    if SLOTS >= 2:
        _store(v, i, _narrow(v1, BT), present, MASKED)
    if DT != tl.float32:  # last, when most registers are free again
        _store_rounded(d, scales, o, c, mask, start, place, steps, N, DT, MASKED)


@triton.jit(do_not_specialize=["T"])
def step(
    words, where, tuned, T, RULE: tl.constexpr, SLOTS: tl.constexpr, COUNTS: tl.constexpr, XT: tl.constexpr,
    GT: tl.constexpr, DT: tl.constexpr, BT: tl.constexpr, HALF: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """x <- x + S u + (S' - S) Delta', Delta <- k Delta + u, where u is the base's update by the rule.

    COUNTS: the steps are counted on the device, and the corrections made from logarithms of the betas. DT is what Delta
    is stored in, BT what the base makes its update and its state in.
    """
    record = _record(words, where)
    if tl.load(record + D) != 0:
        start = _start(where, CHUNK)
        count = _count(record, start, CHUNK)
        whole = _whole(record, count, BLOCK)
        x = _list(record, X, start, XT)
        g = _list(record, G, start, GT)
        d = _list(record, D, start, DT)
        scales = _list(record, DELTA_SCALES, start // SHARING, tl.float32)
        m = _list(record, M, start, BT)
        v = _list(record, V, start, BT)
        r = _list(record, R, start, tl.bfloat16)
        with_g = count
        if SLOTS == 2:  # read now or later, whichever takes fewer registers
            with_g = _count_in(record, G, count)
        of_tuner = tuned + tl.load(record + TUNER) * TUNED
        S = tl.load(of_tuner + SCALE).to(tl.float32)
        change = tl.load(of_tuner + CHANGE).to(tl.float32)
        kept = tl.load(of_tuner + RETENTION).to(tl.float32)
        finite = tl.load(of_tuner + FINITE).to(tl.float32)
        place = tl.load(record + PLACE).to(tl.uint32)
        steps = tl.load(of_tuner + STEPS).to(tl.int64).to(tl.uint32)
        row = words + T.to(tl.int64) * RECORD + tl.load(record + NUMBERS) * NUMBERS_ROW
        sign = _number(row, SIGN).to(tl.float32)
        lr_at = tl.load(record + LR_AT)
        of_device = tl.load(lr_at.to(tl.pointer_type(tl.float32)), lr_at != 0, 1.0)
        lr = (_number(row, LR) * of_device.to(tl.float64)).to(tl.float32)
        decay = _number(row, DECAY).to(tl.float32)
        l2 = _number(row, L2).to(tl.float32)
        n0 = _number(row, OWN).to(tl.float32)
        n1 = _number(row, OWN + 1).to(tl.float32)
        n2 = _number(row, OWN + 2).to(tl.float32)
        n3 = _number(row, OWN + 3).to(tl.float32)
        n4 = _number(row, OWN + 4).to(tl.float32)
        n5 = _number(row, OWN + 5).to(tl.float32)
        n6 = _number(row, OWN + 6).to(tl.float32)
        n7 = _number(row, OWN + 7).to(tl.float32)
        if COUNTS:
            step_at = tl.load(record + STEP)
            made = tl.load(step_at.to(tl.pointer_type(tl.float32)), step_at != 0, 1.0).to(tl.float64)
            n5 = (1 / (1 - tl.exp(made * _number(row, OWN + 5)))).to(tl.float32)
            n6 = (1 / tl.sqrt(1 - tl.exp(made * _number(row, OWN + 6)))).to(tl.float32)
        for o in range(0, whole, BLOCK):
            _step_block(
                o, None, None, count, x, g, d, scales, m, v, r, start, place, steps, S, change, kept, finite, sign, lr,
                decay, l2, n0, n1, n2, n3, n4, n5, n6, n7, RULE, SLOTS, XT, DT, BT, HALF, BLOCK, False,
            )  # fmt: skip
        few = tl.arange(0, SMALL)
        if SLOTS < 2:
            with_g = _count_in(record, G, count)
        for o in range(whole, count, SMALL):
            i = o + few
            _step_block(
                o, i < count, i < with_g, count, x, g, d, scales, m, v, r, start, place, steps, S, change, kept, finite,
                sign, lr, decay, l2, n0, n1, n2, n3, n4, n5, n6, n7, RULE, SLOTS, XT, DT, BT, HALF, SMALL, True,
            )  # fmt: skip
