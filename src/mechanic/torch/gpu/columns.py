"""The layout of the table that the kernels read: what stands in which word.

The table is one array of 64-bit words on the device. It has a record per tensor, then rows of numbers (float64) that
tensors share, then what `tune` needs. Addresses are 0 where there is no such tensor.
"""

from __future__ import annotations

from mechanic.tuner import TunerState

# The record of a tensor.
X, G, D, M, V, R, DELTA_SCALES, STEP, LR_AT = range(9)
"""Addresses: parameter, gradient, Delta, two tensors of the base, residual, Delta's scales in int8, step counter, and
learning rate if that is a tensor. Around a base, M is what the base steps on and V the float32 gradient that it sees.
"""
NUMEL, TUNER, NUMBERS, QUICK, PLACE = range(9, 14)
"""QUICK: all lists are there and aligned, so accesses need no masks. PLACE: a stored Delta is rounded by it."""
RECORD = 14

# A row of numbers.
SIGN, WEIGHT, LR, DECAY, L2, OWN = range(6)
"""The learning rate is LR times what stands at LR_AT, if anything does. OWN is the first of eight of the rule's own."""
NUMBERS_ROW = OWN + 8

# What `tune` needs, behind the numbers: the config, a record per tuner, and a record per param group.
S_INIT, CONFIG_DECAY, LATE_DECAY, EPS, FORGETTING, MIN_LR, MAX_LR = range(7)
CONFIG = 7
TUNER_AT, SHOWN_AT, RATE_AT, RATE, PEAK = range(5)
"""Addresses of a group's tuner, of its ``d``, and of its learning rate if that is a tensor; else its learning rate; the
one that counts as 1."""
GROUP = 5

# What `tune` leaves for the others, by tuner, in float64.
SCALE, CHANGE, RETENTION, FINITE, BEFORE, AFTER, STEPS = range(7)
"""S / k, S' - S / k, k, whether the gradients are finite, S, S', and the number of the step for rounding."""
TUNED = 7
TUNER_ROWS = 1 + len(TunerState._fields)
"""Of a tuner before the step, which `tune` leaves as well: the betas, and the fields of ``TunerState``."""

# The rules that `step` knows.
SGD, MOMENTUM, ADAM, NADAM, LION, RMSPROP, RMSPROP_MOMENTUM, ADAGRAD = range(8)

CHUNK = 1 << 16
"""Elements of one program, as in torch's own kernels over lists."""

BLOCK = 1 << 10
"""Elements that a program works on at once. On AMD it is twice as many in half precision, for 16-byte accesses, unless
Delta is in int8: the registers would not do."""

SMALL = 1 << 8
"""The same for blocks with masks."""
