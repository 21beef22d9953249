"""Parameters of unusual dtype, layout, start or number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.failures.contenders import Contender
from benchmarks.failures.task import (
    HALVED,
    KEEPS_UP,
    SAME_BITS,
    SHARE,
    STEPS,
    Training,
    batch,
    halved,
    is_finite,
    keeps_up_with_model,
    keeps_up_with_undisturbed,
    network,
    same_bits,
    same_bits_as_undisturbed,
)
from benchmarks.failures.verdicts import Outcome, right_if, theme

situation = theme("Parameters")


class _FarFromZero(nn.Module):
    """A linear model whose weights are near 12 and have to move by a few roundings of bfloat16."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        start = (12 + 0.8 * torch.randn(8, 4, generator=generator)).bfloat16()
        self.target = start.float() + 0.4 * torch.randn(8, 4, generator=generator)
        self.weight = nn.Parameter(start.to(dtype))

    def fit(self, contender: Contender) -> tuple[float, float]:
        """Train on it; returns the loss before and after."""
        optimizer = contender.build([self.weight])
        losses = []
        for step in range(STEPS + 1):
            inputs = batch(step)[0]
            optimizer.zero_grad()
            loss = (inputs @ (self.weight.float() - self.target)).square().mean()
            loss.backward()
            losses.append(loss.item())
            if step < STEPS:
                optimizer.step()
        return losses[0], losses[-1]


@situation(
    "bfloat16 parameters, small steps",
    "Weights near 12 have to move by about 0.4, where neighbours in bfloat16 are 0.06 apart.",
    "The loss falls by at least two thirds of what it falls with float32 parameters.",
    r"bfloat16|half|dtype",
)
def bfloat16(contender: Contender) -> Outcome:
    start, expected = _FarFromZero(torch.float32).fit(contender)
    _, found = _FarFromZero(torch.bfloat16).fit(contender)
    detail = f"loss {found:.3g}, with float32 {expected:.3g}, at the start {start:.3g}"
    return right_if(start - found >= SHARE * (start - expected), detail)


@situation("float16 parameters", "The network's parameters are float16.", KEEPS_UP, r"float16|half|dtype")
def float16(contender: Contender) -> Outcome:
    return keeps_up_with_undisturbed(Training(contender, network(torch.float16)).run(), contender)


@situation("float64 parameters", "The network's parameters are float64.", KEEPS_UP, r"float64|double|dtype")
def float64(contender: Contender) -> Outcome:
    training = Training(contender, network(torch.float64)).run()
    if {p.dtype for p in training.params()} != {torch.float64}:
        return right_if(False, "parameters are no longer float64")
    return keeps_up_with_undisturbed(training, contender)


@situation(
    "frozen float8 parameter",
    "The optimizer also holds a float8 weight that needs no gradient.",
    "The float8 weight stays as it was. " + KEEPS_UP,
    r"float8|dtype",
)
def float8(contender: Contender) -> Outcome:
    frozen = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    training = Training(contender, groups=lambda model: [*model.parameters(), frozen]).run()
    if not torch.equal(frozen.float(), torch.ones(4, 4)):
        return right_if(False, "the frozen weight moved")
    return keeps_up_with_undisturbed(training, contender)


class _LowRank(nn.Module):
    """LoRA: a frozen layer plus B A, where B starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(8, 4).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, 8) / 8**0.5)
        self.up = nn.Parameter(torch.zeros(4, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.frozen(inputs) + inputs @ self.down.T @ self.up.T


def _fit(contender: Contender, model: nn.Module) -> Outcome:
    training = Training(contender, model, groups=lambda model: [p for p in model.parameters() if p.requires_grad])
    start, end = training.loss(), training.run().loss()
    return halved(start, end, training.values())


@situation("LoRA: B starts at zero", "Low-rank matrices beside a frozen layer, one of them zero at first.", HALVED)
def lora(contender: Contender) -> Outcome:
    return _fit(contender, _LowRank())


@situation("all parameters start at zero", "A linear layer filled with zeros.", HALVED)
def all_zero(contender: Contender) -> Outcome:
    model = nn.Linear(8, 4)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return _fit(contender, model)


@situation(
    "plateau",
    "A valley in a flat surface, 1 − exp(−x²/2), from x = 4, where the gradient is 0.001.",
    "x is finite and ends nearer to the minimum than it started.",
)
def plateau(contender: Contender) -> Outcome:
    x = nn.Parameter(torch.full((10,), 4.0))
    optimizer = contender.build([x])
    for _ in range(STEPS):
        optimizer.zero_grad()
        (-(-x.square() / 2).exp().mean()).backward()
        optimizer.step()
    end = x.detach().abs().max().item()
    return right_if(is_finite([x.detach()]) and end < 4.0, f"x from 4 to {x.detach()[0].item():.3g}")


@situation(
    "complex parameters",
    "A complex vector has to become another one.",
    "Parameters are within 1% (of the way) of those of the run on real and imaginary parts.",
    r"complex|dtype",
)
def complex_parameters(contender: Contender) -> Outcome:
    target = torch.randn(6, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))

    def fit(p: nn.Parameter) -> Tensor:
        optimizer = contender.build([p])
        for _ in range(200):
            optimizer.zero_grad()
            value = p if p.is_complex() else torch.view_as_complex(p)
            (value - target).abs().square().sum().backward()
            optimizer.step()
        return p.detach() if p.is_complex() else torch.view_as_complex(p.detach())

    real = fit(nn.Parameter(torch.zeros(6, 2)))
    distance = (fit(nn.Parameter(torch.zeros(6, dtype=torch.complex64))) - real).abs().max()
    share = (distance / real.abs().max()).item()
    return right_if(share <= 0.01, f"off by {share:.2g} of the way")


@situation(
    "parameter that changes shape",
    "After 50 steps a layer gets more rows in p.data, as when a vocabulary grows.",
    "Training goes on, with finite parameters and a lower loss.",
    r"shape|size",
)
def changed_shape(contender: Contender) -> Outcome:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(4, 3))
    optimizer = contender.build([p])
    losses = []
    for step in range(STEPS):
        if step == 50:
            p.grad = None
            p.data = torch.cat([p.data, torch.randn(2, 3)])
        p.grad = (p.detach() - 1) / p.numel()
        losses.append((p.detach() - 1).square().mean().item())
        optimizer.step()
    return right_if(is_finite([p.detach()]) and losses[-1] < losses[50], f"loss {losses[50]:.3g} to {losses[-1]:.3g}")


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(2, 8, 3, padding=1)
        self.linear = nn.Linear(8 * 4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs.view(-1, 2, 2, 2)
        if not self.convolution.weight.is_contiguous():
            images = images.to(memory_format=torch.channels_last)
        return self.linear(torch.tanh(self.convolution(images)).flatten(1))


@situation(
    "channels_last parameters",
    "A convolution whose weights are not contiguous.",
    "Keeps up with the run with contiguous weights.",
    r"contiguous|stride|memory_format",
)
def channels_last(contender: Contender) -> Outcome:
    model = _Images().to(memory_format=torch.channels_last)
    return keeps_up_with_model(contender, model, reference=_Images())


class _Twice(nn.Module):
    """Two layers with the same weight: as two modules that share it, or as one module used twice."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.readout = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        if tied:
            self.second = nn.Linear(8, 8, bias=False)
            self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        second = self.second if hasattr(self, "second") else self.first
        return self.readout(second(torch.tanh(self.first(inputs))))


@situation(
    "tied parameters",
    "Two layers share one weight.",
    "They still share it, and parameters are bitwise those of the run with one layer used twice.",
)
def tied(contender: Contender) -> Outcome:
    tied, once = (Training(contender, _Twice(tied)).run(100) for tied in (True, False))
    if tied.model.second.weight is not tied.model.first.weight:
        return right_if(False, "the layers share no weight any more")
    return same_bits(tied.values(), once.values())


@situation(
    "10,000 tensors",
    "20,000 numbers in 10,000 tensors, 10 steps on a sum of squares.",
    "The loss falls by at least two thirds of what it falls with the same numbers in one tensor.",
    seconds=300.0,
)
def many_tensors(contender: Contender) -> Outcome:
    start = 1 + torch.rand(10_000, 2, generator=torch.Generator().manual_seed(0))

    def fit(params: list[nn.Parameter]) -> float:
        optimizer = contender.build(params)
        for _ in range(10):
            for p in params:
                p.grad = p.detach() / 10_000
            optimizer.step()
        return sum(p.detach().square().sum().item() for p in params) / 20_000

    before = start.square().mean().item()
    expected = fit([nn.Parameter(start.clone())])
    found = fit([nn.Parameter(row.clone()) for row in start])
    detail = f"loss {before:.7g} to {found:.7g}, in one tensor to {expected:.7g}"
    return right_if(before - found >= SHARE * (before - expected), detail)


@situation(
    "parameters written from outside",
    "After 100 steps the signs of all hidden units are flipped in the weights, which does not change the loss.",
    "The next step starts from what was written and moves by less than a tenth of it. " + KEEPS_UP,
)
def written(contender: Contender) -> Outcome:
    training = Training(contender).run(100)
    before = training.values()
    with torch.no_grad():
        for p in training.params()[:3]:
            p.neg_()
    flipped = training.values()
    after = training.run(1, first=100).values()
    moved, way = (
        torch.cat([(a - b).flatten() for a, b in zip(new, old, strict=True)]).norm()
        for new, old in ((after, flipped), (flipped, before))
    )
    if not moved < 0.1 * way:
        return right_if(False, f"the next step moves by {moved / way:.2g} of what was written")
    return keeps_up_with_undisturbed(training.run(STEPS - 101, first=101), contender)


@situation("weight clipping", "All parameters are clamped to ±0.3 after every step.", HALVED)
def clamped(contender: Contender) -> Outcome:
    training = Training(contender)
    start = training.loss()

    @torch.no_grad()
    def clamp(step: int) -> None:
        for p in training.params():
            p.clamp_(-0.3, 0.3)

    training.run(after_step=clamp)
    return halved(start, training.loss(), training.values())


@situation("EMA swap", "Every 20 steps an average of the weights is swapped in, and out again.", SAME_BITS)
def swapped(contender: Contender) -> Outcome:
    training = Training(contender)
    average = training.values()

    @torch.no_grad()
    def swap(step: int) -> None:
        for mean, p in zip(average, training.params(), strict=True):
            mean.lerp_(p, 0.1)
        if step % 20 == 19:
            kept = training.values()
            for mean, p in zip(average, training.params(), strict=True):
                p.copy_(mean)
            for value, p in zip(kept, training.params(), strict=True):
                p.copy_(value)

    return same_bits_as_undisturbed(training.run(100, after_step=swap), contender)
