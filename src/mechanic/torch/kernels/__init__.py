"""The work that grows with the model, as functions over lists of tensors.

A set of kernels is a module with the functions of :class:`Kernels`. ``eager`` is the reference: every other set must
give the same results as it does, up to rounding.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    """What a set of kernels must have.

    Lists are of equal length and shapes. S, S' and all other factors are 0-dim tensors on the device of the lists, so
    that no function waits for the device. Everything is changed in place.
    """

    def measure(
        self, params: list[Tensor], grads: list[Tensor], deltas: list[Tensor], sign: float, device: torch.device
    ) -> Tensor:
        """The five sums of :data:`mechanic.tuner.SUMS` over parameters on one device, [5].

        ``grads`` and ``deltas`` are empty if no parameter has one; they then count as zero. ``sign`` is -1 if the base
        ascends.
        """

    def combine(
        self,
        values: list[Tensor],
        stepped: list[Tensor],
        deltas: list[Tensor],
        scale: Tensor,
        change: Tensor,
        retention: Tensor | None = None,
    ) -> None:
        """Scale what the base did to copies of the parameters.

        On entry ``values`` hold x and ``stepped`` x + u. On return ``deltas`` hold Delta' = k Delta + u and ``values``
        x' = x + S u + (S' - S) Delta', where k is the ``retention`` and S' - S the ``change``. With the former S
        divided by k this is x + S' Delta' - S Delta. It never needs x_1, and it keeps what others did to the
        parameters between steps. ``stepped`` is overwritten.
        """

    def prepare_delta(
        self, values: list[Tensor], deltas: list[Tensor], scale: Tensor, decay: float, retention: Tensor | None = None
    ) -> None:
        """x <- x - S Delta; Delta <- k Delta - decay x. The base may now step on Delta in place of x."""

    def restore_delta(
        self, values: list[Tensor], deltas: list[Tensor], scale: Tensor, decay: float, retention: Tensor | None = None
    ) -> None:
        """The inverse of :meth:`prepare_delta`, up to rounding."""

    def add_scaled(self, values: list[Tensor], directions: list[Tensor], factor: Tensor) -> None:
        """x <- x + factor d."""

    def add_scaled_step(self, values: list[Tensor], stepped: list[Tensor], scale: Tensor | None) -> None:
        """x <- x + S u, where ``stepped`` holds x + u and is overwritten. None is S = 1."""
