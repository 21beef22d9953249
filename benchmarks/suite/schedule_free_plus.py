"""ScheduleFree+ as its author describes it (Defazio 2026, arXiv 2605.19095), in our own writing: it is not on PyPI.

Adam's iterate z, its average x, and y between them, where gradients are taken. The learning rate is Polyak's: what is
left of the loss over the L1 norm of the gradient, as if the loss could reach 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamScheduleFreePlus(Optimizer):
    """At the author's defaults. ``step`` needs the loss that the gradients are of.

    ``warm_up`` steps lead to the whole learning rate, and x follows z until then, as the author advises.
    """

    takes_loss = True

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        between: float = 0.9,
        eps: float = 1e-8,
        warm_up: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "between": between, "eps": eps, "warm_up": warm_up}
        super().__init__(params, {**defaults, "steps": 0, "largest": 0.0, "weights": 0.0, "at_average": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if closure is None:
            raise ValueError("step() needs a closure that returns the loss")
        loss = closure()
        rate = self._polyak(float(loss))
        for group in self.param_groups:
            self._step(group, max(group["lr"], group["eps"]) * rate)
        return loss

    def _polyak(self, loss: float) -> float:
        norm = slope = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    norm += p.grad.abs().sum().item()
                    if state := self.state[p]:
                        slope += group["between"] * (p.grad * (state["z"] - state["x"])).sum().item()
        expected = math.sqrt(math.pi / 2) * norm  # of Gaussian numbers with this L1 norm
        return max(0.0, loss + slope) / expected if expected else 0.0

    def _step(self, group: dict[str, Any], lr: float) -> None:
        is_warm = group["steps"] >= group["warm_up"]
        group["steps"] += 1
        if not is_warm:
            lr *= group["steps"] / group["warm_up"]
        group["largest"] = max(group["largest"], lr, group["eps"])
        weight = group["largest"] ** 2 if is_warm else 0.0
        group["weights"] += weight
        share = weight / group["weights"] if is_warm else 1.0
        between, (beta1, beta2) = group["between"], group["betas"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update({name: p.detach().clone() for name in ("x", "y", "z")})
                state.update({name: torch.zeros_like(p) for name in ("mean", "square")})
            x, y, z = state["x"], state["y"], state["z"]
            state["mean"].lerp_(p.grad, 1 - beta1)
            state["square"].lerp_(p.grad.square(), 1 - beta2)
            mean = state["mean"] / (1 - beta1 ** group["steps"])
            size = (state["square"] / (1 - beta2 ** group["steps"])).sqrt_().add_(group["eps"])
            z.addcdiv_(mean, size, value=-lr)
            x.lerp_(z, share)
            p.copy_(y.copy_(x).lerp_(z, 1 - between))

    def eval(self) -> None:
        """To the average, which is what the author evaluates."""
        self._show("x", at_average=True)

    def train(self) -> None:
        self._show("y", at_average=False)

    @torch.no_grad()
    def _show(self, iterate: str, *, at_average: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["at_average"] is not at_average else ():
                if state := self.state[p]:
                    p.copy_(state[iterate])
            group["at_average"] = at_average
