"""What Mechanic keeps in a checkpoint: which key holds what.

Everything is stored where PyTorch's checkpoint routes look: Delta beside the base's own state of each parameter, the
tuner in each param group. Only tensors, numbers and one string are stored, which ``torch.load(weights_only=True)`` and
``torch.distributed.checkpoint`` both accept.

===================  ==========================  ======================================================
where                key                         what
===================  ==========================  ======================================================
``state[p]``         ``mechanic_delta``          Delta, with the shape and placement of p, in float32
                                                 or more, or in bfloat16 if it is kept so; absent once
                                                 the scale is frozen
``state[p]``         ``mechanic_residual``       what rounding cut off; of half-precision p only
``param_groups[i]``  ``mechanic_format``         1, the number of this layout
``param_groups[i]``  ``mechanic_base``           the class name of the base, or of the group's optimizer
                                                 if they are several
``param_groups[i]``  ``mechanic_row``            which tuner the group belongs to
``param_groups[i]``  ``mechanic_tuner``          [13, n]: the betas, then the fields of TunerState
``param_groups[i]``  ``mechanic_unit``           the peak learning rate, which counts as 1
``param_groups[i]``  ``mechanic_lr``             the learning rate of the last step
``param_groups[i]``  ``mechanic_frozen``         S, if it is frozen
``param_groups[i]``  ``mechanic_skipped``        how many steps were skipped
``param_groups[i]``  ``mechanic_own_iterates``   1, if the base steps on iterates of its own
``param_groups[i]``  ``d``                       S / peak_lr: ``d * lr`` is the effective learning rate
===================  ==========================  ======================================================

In memory, int8 codes stand under ``mechanic_delta``, and their scales beside them under ``mechanic_delta_scales``. A
checkpoint has these decoded, in float32: blocks of codes could not be sharded anew. Loading makes the same codes of it.

A checkpoint that does not fit is refused with a ValueError that names the entry, and nothing has changed then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor

FORMAT = 1

DELTA = "mechanic_delta"
DELTA_SCALES = "mechanic_delta_scales"
RESIDUAL = "mechanic_residual"
STATE_KEYS = (DELTA, DELTA_SCALES, RESIDUAL)

TUNER = "mechanic_tuner"
ROW = "mechanic_row"
PEAK_LR = "mechanic_unit"
LAST_LR = "mechanic_lr"
FROZEN = "mechanic_frozen"
SKIPPED = "mechanic_skipped"
OWN_ITERATES = "mechanic_own_iterates"
GROUP_KEYS = ("mechanic_format", "mechanic_base", ROW, TUNER, PEAK_LR)
SAME = ("mechanic_format", "mechanic_base", "tuner", OWN_ITERATES)  # in a checkpoint and where it is loaded

StateDict = dict[str, Any]
Group = dict[str, Any]


def params_of(groups: Iterable[Group]) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in groups)


def rows_of(groups: list[Group]) -> dict[int, int]:
    """The index of each row among the tuners of groups. ZeRO steps one group at a time, so rows can be missing."""
    return {row: index for index, row in enumerate(dict.fromkeys(group[ROW] for group in groups))}
