"""What is measured on a GPU: steps, memory, training of a GPT with the shapes of GPT-2, and the replay of a graph."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks.speed.agreement import using
from benchmarks.speed.contenders import CONTENDERS
from benchmarks.speed.device import WARM_UP, Device
from benchmarks.suite.models import GPT
from mechanic.torch import Mechanic

STEPS = ["AdamW fused", "AdamW foreach", "SGD momentum", "Mechanic(AdamW)", "Mechanic(AdamW), on copies"]
STEPS += ["Mechanic(AdamW foreach)", "Mechanic(SGD)"]
PEERS = ["mechanic-pytorch AdamW", "D-Adaptation", "Prodigy", "Schedule-Free"]
IN_HALF = ["AdamW fused", "Mechanic(AdamW)"]
TRAINED = ["AdamW fused", "Mechanic(AdamW)", *PEERS]


def gpt(device: Device) -> GPT:
    """GPT-2 of 124M parameters, whose head is its embedding; a toy in tiny mode."""
    sizes = {"vocabulary": 50_257, "length": 1024, "width": 768, "layers": 12, "heads": 12}
    if device.tiny:
        sizes = {"vocabulary": 50, "length": 16, "width": 16, "layers": 1, "heads": 2}
    torch.manual_seed(0)
    model = GPT(**sizes, dropout=0.0)
    model.head.weight = model.tokens.weight
    return model.to(device.torch_device)


def steps(device: Device) -> list[dict[str, Any]]:
    """Every optimizer's step on tensors with random gradients, and the bytes per parameter that it takes."""
    shapes = [tuple(p.shape) for p in gpt(device).parameters()]
    rows = [(name, torch.float32, "") for name in [*STEPS, *PEERS]]
    rows += [("Mechanic(AdamW)", torch.float32, "eager"), *((name, torch.bfloat16, "") for name in IN_HALF)]
    found = []
    for name, dtype, kernels in rows:
        about = {"contender": name, "dtype": str(dtype).removeprefix("torch."), "kernels": kernels}
        found.append(about | _tried(lambda: _step(device, name, dtype, kernels, shapes)))  # noqa: B023 called at once
        _clean(device)
    return found


def _step(device: Device, name: str, dtype: torch.dtype, kernels: str, shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": dtype, "device": device.torch_device}
    params: list[Tensor] = [torch.nn.Parameter(0.02 * torch.randn(shape, **options)) for shape in shapes]
    for p in params:
        p.grad = 0.01 * torch.randn_like(p)
    before, elements = device.allocated(), sum(p.numel() for p in params)
    optimizer = _built(name, params)

    def run() -> None:
        if kernels:
            with using(kernels):
                optimizer.step()
        else:
            optimizer.step()

    times: dict[str, Any] = device.times(run)
    kept = device.allocated()
    with device.peak() as peak:
        run()
    if peak:
        kept_bytes, passing_bytes = (round(size / elements, 2) for size in (kept - before, peak[0] - kept))
        times |= {"kept_bytes": kept_bytes, "passing_bytes": passing_bytes}
    return times


def training(device: Device) -> list[dict[str, Any]]:
    """A whole training step: forward, backward and step; the forward pass in bfloat16 where there is a GPU."""
    found = []
    for name in TRAINED:
        found.append({"contender": name} | _tried(functools.partial(_train, device, name)))
        _clean(device)
    return found


def _train(device: Device, name: str) -> dict[str, Any]:
    model = gpt(device)
    batch, length = (2, 16) if device.tiny else (8, 1024)
    tokens = torch.randint(model.tokens.num_embeddings, (batch, length + 1), device=device.torch_device)
    optimizer = _built(name, list(model.parameters()))

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.torch_device.type, torch.bfloat16, enabled=device.is_gpu):
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    times: dict[str, Any] = device.times(run)
    with device.peak() as peak:
        run()
    of_memory = {"peak_gb": round(peak[0] / 1e9, 3)} if peak else {}
    return {"tokens": batch * length, "parameters": sum(p.numel() for p in model.parameters()), **times, **of_memory}


def graph(device: Device) -> dict[str, Any]:
    """Replays of a captured step against plain steps: the time, and whether they move the parameters alike.

    The learning rate changes between replays, as with a scheduler.
    """
    if not device.is_gpu:
        return {"skipped": "CUDA graphs need a GPU"}
    shapes = [tuple(p.shape) for p in gpt(device).parameters()]
    rates, params, optimizers = [], [], []
    for _ in range(2):
        torch.manual_seed(0)
        own: list[Tensor] = [torch.nn.Parameter(0.02 * torch.randn(s, device=device.torch_device)) for s in shapes]
        for p in own:
            p.grad = 0.01 * torch.randn_like(p)
        lr = torch.tensor(1.0, device=device.torch_device)
        rates.append(lr)
        params.append(own)
        optimizers.append(Mechanic(AdamW(own, lr=lr, fused=True, capturable=True)))
    plain, captured = optimizers
    for _ in range(WARM_UP):
        plain.step()
    device.wait()
    stream = torch.cuda.Stream(device.torch_device)
    stream.wait_stream(torch.cuda.current_stream(device.torch_device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            captured.step()
    torch.cuda.current_stream(device.torch_device).wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        captured.step()
    for number in range(5):
        for p, q in zip(*params, strict=True):
            assert p.grad is not None
            assert q.grad is not None
            p.grad.normal_()
            q.grad.copy_(p.grad)
        for lr in rates:
            lr.fill_(1.0 - 0.15 * number)
        plain.step()
        recorded.replay()
    pairs = zip(*params, strict=True)
    difference = max(((p - q).abs().max() / p.abs().max()).item() for p, q in pairs if p.numel())
    scales = [optimizer.scales()["default"] for optimizer in optimizers]
    return {
        "difference": difference,
        "agree": difference <= 1e-4 and abs(scales[0] - scales[1]) <= 1e-4 * abs(scales[0]),
        "plain": device.times(plain.step),
        "replay": device.times(recorded.replay),
    }


def _built(name: str, params: list[Tensor]) -> Any:
    with redirect_stdout(None):  # some peers print when they are built
        return CONTENDERS[name].build(params)


def _tried(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it returns, or why it did not: the other rows are still of interest."""
    try:
        return run()
    except ImportError as error:
        return {"skipped": f"{error.name} is not installed"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def _clean(device: Device) -> None:
    gc.collect()
    if device.is_gpu:
        torch.cuda.empty_cache()
