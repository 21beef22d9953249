"""Losses of tasks that are no classification, and how their batches are prepared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.suite.task import Loss, Prepared, cross_entropy


def squares(model: nn.Module, prepared: Prepared) -> Tensor:
    inputs, targets = prepared
    return nn.functional.mse_loss(model(*inputs), targets)


def scaled(factor: float) -> Loss:
    """Cross-entropy in another unit."""
    return lambda model, prepared: factor * cross_entropy(model, prepared)


def weighted_squares(model: nn.Module, prepared: Prepared) -> Tensor:
    """As GloVe: a rare pair counts less. The targets are logarithms of occurrences in a million characters."""
    inputs, targets = prepared
    weights = (targets.exp() / 1000).clamp(max=1) ** 0.75
    return (weights * (model(*inputs) - targets) ** 2).mean()


# The input is what is to be answered.


def itself(batch: tuple[Tensor, ...], generator: torch.Generator) -> Prepared:
    return (batch[0],), batch[0]


def without_noise(batch: tuple[Tensor, ...], generator: torch.Generator) -> Prepared:
    """Standardised images with as much noise as there is image."""
    return (batch[0] + torch.randn(batch[0].shape, generator=generator),), batch[0]


def its_noise(batch: tuple[Tensor, ...], generator: torch.Generator) -> Prepared:
    """Diffusion: between image (time 0) and noise (1) on a quarter of a circle; the noise is asked for."""
    (images,) = batch
    times = torch.rand(len(images), generator=generator)
    noise = torch.randn(images.shape, generator=generator)
    angles = (0.5 * torch.pi * times).view(-1, 1, 1, 1)
    return (angles.cos() * images + angles.sin() * noise, times), noise


# Two views of one thing are to be found among the views of others.


def two_views(batch: tuple[Tensor, ...], generator: torch.Generator) -> Prepared:
    """Images of 28 x 28, each twice: a random part of 24 x 24, which shifts it, with noise."""
    images, labels = batch

    def view() -> Tensor:
        offsets = torch.randint(5, (2, len(images), 1), generator=generator) + torch.arange(24)
        rows, columns = offsets[0].unsqueeze(2), offsets[1].unsqueeze(1)
        parts = images[torch.arange(len(images)).view(-1, 1, 1), 0, rows, columns].unsqueeze(1)
        return parts + 0.3 * torch.randn(parts.shape, generator=generator)

    return (view(), view()), labels


def both(batch: tuple[Tensor, ...], generator: torch.Generator) -> Prepared:
    return batch, batch[0]


def contrastive(temperature: float) -> Loss:
    """InfoNCE, both ways; the model gives an embedding of each."""

    def loss(model: nn.Module, prepared: Prepared) -> Tensor:
        first, second = (nn.functional.normalize(model(view), dim=-1) for view in prepared[0])
        scores, right = first @ second.T / temperature, torch.arange(len(first), device=first.device)
        return (nn.functional.cross_entropy(scores, right) + nn.functional.cross_entropy(scores.T, right)) / 2

    return loss


# Physics: a network u(x, t) is asked for an equation, zero at the borders, and a start.

Equation = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # u, u_t, u_x, u_xx


def heat(u: Tensor, u_t: Tensor, u_x: Tensor, u_xx: Tensor) -> Tensor:
    return u_t - 0.1 * u_xx


def burgers(u: Tensor, u_t: Tensor, u_x: Tensor, u_xx: Tensor) -> Tensor:
    return u_t + u * u_x - 0.05 * u_xx


def two_waves(x: Tensor) -> Tensor:
    return (torch.pi * x).sin() + 0.5 * (3 * torch.pi * x).sin()


def falling_wave(x: Tensor) -> Tensor:
    return -(torch.pi * x).sin()


def physics(equation: Equation, start: Callable[[Tensor], Tensor]) -> Loss:
    """The borders and the start count ten times, as they do where this is usual."""

    @torch.enable_grad()  # an evaluation needs derivatives, too
    def loss(model: nn.Module, prepared: Prepared) -> Tensor:
        inside, border, at_start = prepared[0]
        inside = inside.clone().requires_grad_()
        u = model(inside)
        (slope,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
        u_x, u_t = slope.unbind(-1)
        (curvature,) = torch.autograd.grad(u_x.sum(), inside, create_graph=True)
        residual = equation(u.squeeze(-1), u_t, u_x, curvature[:, 0])
        wrong_start = model(at_start).squeeze(-1) - start(at_start[:, 0])
        return residual.square().mean() + 10 * (model(border).square().mean() + wrong_start.square().mean())

    return loss
