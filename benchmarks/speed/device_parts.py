"""What is measured on a GPU: steps, memory, and training of a GPT with the shapes of GPT-2."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.contenders import CONTENDERS
from benchmarks.speed.device import Device
from benchmarks.suite.models import GPT

STEPS = ["AdamW fused", "AdamW foreach", "SGD momentum", "Mechanic(AdamW)", "Mechanic(AdamW foreach)", "Mechanic(SGD)"]
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
    found = []
    for name, dtype in [*((n, torch.float32) for n in [*STEPS, *PEERS]), *((n, torch.bfloat16) for n in IN_HALF)]:
        about = {"contender": name, "dtype": str(dtype).removeprefix("torch.")}
        found.append(about | _tried(functools.partial(_step, device, name, dtype, shapes)))
        _clean(device)
    return found


def _step(device: Device, name: str, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": dtype, "device": device.torch_device}
    params: list[Tensor] = [torch.nn.Parameter(0.02 * torch.randn(shape, **options)) for shape in shapes]
    for p in params:
        p.grad = 0.01 * torch.randn_like(p)
    before, elements = device.allocated(), sum(p.numel() for p in params)
    optimizer = _built(name, params)
    times: dict[str, Any] = device.times(optimizer.step)
    kept = device.allocated()
    with device.peak() as peak:
        optimizer.step()
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
