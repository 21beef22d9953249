"""What a step asks of a GPU, as a table: ``python -m benchmarks.speed.launches`` counts it, without a GPU.

It is counted, not timed; :mod:`benchmarks.speed.counter` names the assumptions.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from benchmarks.speed.contenders import CONTENDERS
from benchmarks.speed.counter import CUDA_12, CUDA_13, Counter, count_step
from mechanic.torch import Mechanic, Together

Shapes = list[tuple[int, ...]]


def gpt2() -> Shapes:
    """124M parameters in 148 tensors; the head is the embedding."""
    layer: Shapes = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)]
    layer += [(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
    return [(50257, 768), (1024, 768), *(12 * layer), (768,), (768,)]


def llama() -> Shapes:
    """The shapes of Llama 3.2 1B: 1.24 billion parameters in 146 tensors."""
    attention: Shapes = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048)]
    layer = [*attention, (8192, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,)]
    return [(128256, 2048), *(16 * layer), (2048,)]


def resnet50() -> Shapes:
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions: Shapes = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            convolutions += [(4 * width, channels, 1, 1)] if block == 0 else []
            for convolution in convolutions:
                shapes += [convolution, convolution[:1], convolution[:1]]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def lora() -> Shapes:
    """Two small matrices for each of 224 large ones that are not trained."""
    return 224 * [(4, 4096), (4096, 4)]


MODELS = {"GPT-2 124M": gpt2(), "Llama 1.24B": llama(), "ResNet-50": resnet50(), "LoRA of 448": lora()}


@dataclass(frozen=True)
class Row:
    build: Callable[[list[Tensor]], Any]
    dtype: torch.dtype = torch.float32
    prepare: Callable[[Any], Any] = lambda optimizer: None


class _Own(AdamW):
    """Of a class that Mechanic does not know."""


def _adamw(params: Any) -> AdamW:
    return AdamW(params, lr=1.0, fused=True)


def _muon(params: list[Tensor]) -> Together:
    """Muon for the matrices, and AdamW for the rest, which is embeddings and what has not two dimensions."""
    matrices = [p for p in params if p.ndim == 2 and tuple(p.shape) not in EMBEDDINGS]
    rest = [p for p in params if all(p is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=1.0, adjust_lr_fn="match_rms_adamw")]
    return Together(*optimizers, *([_adamw(rest)] if rest else []))


def _in_groups(params: list[Tensor], count: int) -> list[dict[str, Any]]:
    size = -(-len(params) // count)
    return [{"params": params[start : start + size]} for start in range(0, len(params), size)]


def _pytorch_optimizer(name: str) -> Callable[[list[Tensor]], Any]:
    def build(params: list[Tensor]) -> Any:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(params, lr=1.0)

    return build


def _mechanic_pytorch(params: list[Tensor]) -> Any:
    from mechanic_pytorch import mechanize

    return mechanize(AdamW)(params, lr=1.0, foreach=True)


EMBEDDINGS = {(50257, 768), (1024, 768), (128256, 2048)}
HALF = torch.bfloat16
ROWS = {
    "AdamW fused": Row(_adamw),
    "AdamW foreach": Row(CONTENDERS["AdamW foreach"].build),
    "SGD momentum, fused": Row(CONTENDERS["SGD momentum"].build),
    "`Mechanic(AdamW fused)`": Row(lambda p: Mechanic(_adamw(p))),
    "`Mechanic(AdamW foreach)`": Row(CONTENDERS["Mechanic(AdamW foreach)"].build),
    "`Mechanic(own class of AdamW)`": Row(lambda p: Mechanic(_Own(p, lr=1.0, fused=True))),
    "`Mechanic(SGD momentum, fused)`": Row(CONTENDERS["Mechanic(SGD)"].build),
    "`Mechanic(SGD nesterov, fused)`": Row(
        lambda p: Mechanic(SGD(p, lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True))
    ),
    "`Mechanic(AdamW fused)`, 2 tuners": Row(lambda p: Mechanic(_adamw(_in_groups(p, 2)), per_group=True)),
    "`Mechanic(AdamW fused)`, 12 tuners": Row(lambda p: Mechanic(_adamw(_in_groups(p, 12)), per_group=True)),
    "`Mechanic(AdamW fused)`, `skip_nonfinite`": Row(lambda p: Mechanic(_adamw(p), skip_nonfinite=True)),
    "`Mechanic(AdamW fused)`, frozen": Row(lambda p: Mechanic(_adamw(p)), prepare=Mechanic.freeze),
    "Muon and AdamW fused": Row(_muon),
    "`Mechanic(Muon and AdamW fused)`": Row(lambda p: Mechanic(_muon(p))),
    "AdamW fused, bfloat16": Row(_adamw, HALF),
    "`Mechanic(AdamW fused)`, bfloat16": Row(lambda p: Mechanic(_adamw(p)), HALF),
    "`Mechanic(AdamW fused)`, bfloat16, frozen": Row(lambda p: Mechanic(_adamw(p)), HALF, Mechanic.freeze),
    "mechanic-pytorch, AdamW foreach": Row(_mechanic_pytorch),
    "Prodigy (prodigyopt)": Row(CONTENDERS["Prodigy"].build),
    "D-Adaptation (dadaptation)": Row(CONTENDERS["D-Adaptation"].build),
    "Prodigy (pytorch_optimizer)": Row(_pytorch_optimizer("Prodigy")),
    "Lion (pytorch_optimizer)": Row(_pytorch_optimizer("Lion")),
    "Schedule-Free AdamW (schedulefree)": Row(CONTENDERS["Schedule-Free"].build),
}
FIGURES = ["calls", "words", "host reads", "copies to the device"]


def count(name: str, model: str) -> Counter:
    row = ROWS[name]
    with redirect_stdout(None):  # some peers print when they are built
        return count_step(row.build, MODELS[model], row.dtype, row.prepare)


def table(names: list[str], models: list[str]) -> str:
    """Launches on every model, and the other figures on the first one."""
    lines = ["| | " + " | ".join([*models, *FIGURES]) + " |", "|---" * (1 + len(models) + len(FIGURES)) + "|"]
    for name in names:
        counted = [count(name, model) for model in models]
        cells = [f"{c.launches_with(CUDA_12):,} / {c.launches_with(CUDA_13):,}" for c in counted]
        first, elements = counted[0], sum(math.prod(shape) for shape in MODELS[models[0]])
        cells += [f"{first.calls.total():,}", f"{first.bytes / 4 / elements:.1f}", str(first.host_reads)]
        cells += [str(first.copies_to_device)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.launches", description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(ROWS), metavar="ROW", help="some of the optimizers")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--operators", action="store_true", help="print launches by operator instead")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of torch and the peers about meta tensors
    if not arguments.operators:
        print(table(arguments.only, arguments.models))
        return
    for name in arguments.only:
        for model in arguments.models:
            by_operator = count(name, model).launches[CUDA_13].most_common()
            print(f"{name}, {model}: {', '.join(f'{launches} {operator}' for operator, launches in by_operator)}")


if __name__ == "__main__":
    main()
