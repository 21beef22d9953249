"""Launching the kernels. Triton is imported with the first launch, not before."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mechanic.config import TunerConfig
from mechanic.torch.gpu import columns
from mechanic.torch.gpu.table import Kind, Span, Table
from mechanic.tuner import SUMS

REDUCED = 128
"""How many parts `tune` adds at once."""

IS_AMD = torch.version.hip is not None


@functools.cache
def programs() -> dict[str, Any]:
    """The kernels by name."""
    from mechanic.torch.gpu import around, programs, tuning

    modules = (programs, ("five_sums", "step")), (around, ("lend", "move")), (tuning, ("add", "tune"))
    return {name: getattr(module, name) for module, names in modules for name in names}


def launch(name: str, count: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Start ``count`` programs of a kernel."""
    if count:
        with _on(device):
            programs()[name][(count,)](*arguments, **constants, **options(constants, amd=IS_AMD))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def five_sums(table: Table) -> Tensor:
    """The sums of every program, [programs, 5]."""
    parts = torch.empty(table.programs, 5, dtype=torch.float64, device=table.device)
    for span in table.spans:
        constants = {key: value for key, value in _constants(span.kind).items() if key != "HALF"}
        _launch_over(table, span, "five_sums", parts[span.first :], DT=_type(span.kind.delta_dtype), **constants)
    return parts


def add(table: Table, parts: Tensor, tuners: int) -> Tensor:
    """The sums by tuner, [tuners, 5]."""
    sums = torch.empty(tuners, len(SUMS), dtype=torch.float64, device=table.device)
    arguments = table.words, parts, sums, table.offset_of_rest, len(table.spans)
    launch("add", tuners, table.device, *arguments, RED=REDUCED)
    return sums


def tune(
    table: Table, parts: Tensor | None, summed: tuple[Tensor, Tensor] | None, tuners: int, config: TunerConfig
) -> tuple[Tensor, Tensor]:
    """One step of all tuners. Returns what others need of it, [tuners, TUNED], and the former, [tuners, TUNER_ROWS, n].

    ``summed`` are the five sums, [tuners, 5], and |g|^2 of the gradients that the base steps with, [tuners]; None if
    all of that is still in ``parts``.
    """
    tuned = torch.empty(tuners, columns.TUNED, dtype=torch.float64, device=table.device)
    sums, grad_sqs = summed or (parts, parts)
    parts = sums if parts is None else parts  # one of them is not read
    n = len(config.betas)
    unchanged = torch.empty(tuners, columns.TUNER_ROWS, n, dtype=torch.float64, device=table.device)
    sizes = table.tensors, table.offset_of_rest, len(table.spans)
    constants = {
        "N": n,
        "P": 1 << (n - 1).bit_length(),
        "RED": REDUCED,
        "ADDS": summed is None,
        "RELATIVE_START": config.relative_start,
        "GUARD": config.guard,
        "SETTLE": config.settle,
        "FORGETS": bool(config.forgetting),
        "BOUNDS": config.has_bounds,
        "COUNTS": any(span.kind.counts for span in table.spans),
    }
    launch("tune", tuners, table.device, table.words, parts, sums, grad_sqs, tuned, unchanged, *sizes, **constants)
    return tuned, unchanged


def step(table: Table, tuned: Tensor) -> None:
    """The base's step and Mechanic's. ``tuned``, [tuners, TUNED], is what `tune` left."""
    for span in table.spans:
        rule = {"RULE": span.kind.rule, "SLOTS": span.kind.slots, "COUNTS": span.kind.counts}
        types = {"DT": _type(span.kind.delta_dtype), "BT": _type(span.kind.base_dtype)}
        _launch_over(table, span, "step", tuned, **rule, **types, **_constants(span.kind))


def lend(table: Table, tuned: Tensor, *, lends_delta: bool, offset: bool) -> None:
    """Prepare what a base is to step on."""
    for span in table.spans:
        way = {"LENDS_DELTA": lends_delta, "OFFSET": offset}
        _launch_over(table, span, "lend", tuned, **way, **_constants(span.kind))


def move(table: Table, tuned: Tensor, *, lends_delta: bool, offset: bool) -> None:
    """Scale what a base did."""
    for span in table.spans:
        way = {"LENDS_DELTA": lends_delta, "OFFSET": offset}
        _launch_over(table, span, "move", tuned, **way, **_constants(span.kind))


def _launch_over(table: Table, span: Span, name: str, data: Tensor, **constants: Any) -> None:
    where = table.where[span.first :]
    launch(name, span.programs, table.device, table.words, where, data, table.tensors, **constants)


def _constants(kind: Kind) -> dict[str, Any]:
    types = {"XT": _type(kind.dtype), "GT": _type(kind.grad_dtype)}
    return {**types, "HALF": kind.is_half, **sizes(half=kind.is_half, int8=kind.delta_dtype == torch.int8)}


def _type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def sizes(*, half: bool, int8: bool = False, amd: bool = IS_AMD) -> dict[str, int]:
    """How many elements are worked on at once."""
    block = columns.BLOCK * (2 if amd and half and not int8 else 1)
    return {"CHUNK": columns.CHUNK, "BLOCK": block, "SMALL": columns.SMALL}


def options(constants: dict[str, Any], *, amd: bool) -> dict[str, Any]:
    """How a kernel is compiled. Five waves leave 96 registers to each.

    NVIDIA's compiler keeps to as many by itself, but not with state and stored Deltas. There it takes more, or spills
    although it has enough.
    """
    registers = {"waves_per_eu": 5} if amd else {}
    if not amd and constants.get("SLOTS") and str(constants["DT"]) != "fp32":
        registers = {"maxnreg": 96 if constants["SLOTS"] == 2 else 80}
    return {"num_warps": 4, "enable_fp_fusion": True, **registers}
