"""``mechanic show``: what a checkpoint holds. Nothing in it is executed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mechanic.cli.sharded import is_sharded, read_sharded
from mechanic.torch.layout import (
    DELTA,
    FROZEN,
    PEAK_LR,
    ROW,
    SKIPPED,
    STATE_KEYS,
    TUNER,
    Group,
    last_rate,
    learned_rate_of,
    read_on_host,
    scale_of,
    with_all_rows,
)

FILES = ("*.pt", "*.pth", "*.bin", "*.ckpt", "*.tar")


def show(checkpoint: str) -> str:
    """Describe every optimizer in a file or folder."""
    path = Path(checkpoint)
    if not path.exists():
        raise SystemExit(f"there is no file or folder {checkpoint}")
    files = [path]
    if path.is_dir() and not is_sharded(path):
        files = sorted({file for pattern in FILES for file in path.glob(pattern)})
        if not files:
            raise SystemExit(f"{checkpoint} has neither a .metadata nor a file such as optimizer.pt")
    texts: list[str] = []
    unread: list[str] = []  # a tokenizer, perhaps
    for file in files:
        content, why = _read(file)
        if why:
            unread.append(f"{file} could not be read with torch.load(weights_only=True): {why}")
        texts += _describe_file(file, content)
    if unread and not texts:
        raise SystemExit("\n".join(unread))
    if not texts:
        raise SystemExit(f"no optimizer was found in {checkpoint}; was only the model saved?")
    return "\n\n".join(texts)


def _read(path: Path) -> tuple[Any, str]:
    """What is in a file or a sharded checkpoint; if torch refuses it, nothing, and why."""
    if is_sharded(path):
        return read_sharded(path), ""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # the arguments of a script
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path)), ""
    except Exception as error:  # torch has many ways to say that a file is not its own
        return None, _why(error)


def _describe_file(path: Path, content: Any) -> Iterator[str]:
    for where, found in _optimizers(content):
        place = f"{path}, {where}" if where else str(path)
        yield f"{place}\n" + "\n".join(f"  {line}" for line in _describe(found))


def _why(error: Exception) -> str:
    """What torch says, in one line. Its first line announces what to do, and the reason comes later."""
    text = str(error).strip()
    if unsupported := re.search(r"Unsupported global: GLOBAL (\S+)", text):
        return f"it holds a {unsupported[1]}, which is not loaded, as it could execute anything"
    return text.splitlines()[0] if text else type(error).__name__


def _is_zip(path: Path) -> bool:
    """Whether torch can map the file instead of reading all of it; files of old versions are no zip archives."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _optimizers(content: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The state dicts of optimizers, with their place in the checkpoint."""
    if isinstance(content, dict):
        groups = content.get("param_groups")
        if isinstance(groups, list | tuple) and all(isinstance(group, dict) for group in groups) and groups:
            yield where, content
            return
        inside = content.items()
    elif isinstance(content, list | tuple):
        inside = enumerate(content)  # type: ignore[assignment]
    else:
        return
    for key, value in inside:
        yield from _optimizers(value, f"{where}[{key!r}]")


def _describe(state_dict: dict[str, Any]) -> Iterator[str]:
    groups: list[Group] = [with_all_rows(group) for group in state_dict["param_groups"]]
    state = state_dict.get("state") or {}
    count = sum(len(group.get("params") or ()) for group in groups)
    whole = f"{_plural(len(groups), 'group')}, {_plural(count, 'parameter tensor')}"
    if not all("mechanic_format" in group and isinstance(group.get(TUNER), Tensor) for group in groups):
        yield f"a plain optimizer, without Mechanic; {whole}"
        yield f"{_size(state, None)} of state"
        return
    bases = dict.fromkeys(str(group["mechanic_base"]) for group in groups)
    yield f"Mechanic around {' and '.join(bases)}; {whole}; format {groups[0]['mechanic_format']}"
    tuner = read_on_host(groups)
    for row in dict.fromkeys(group[ROW] for group in groups):
        indices = [index for index, group in enumerate(groups) if group[ROW] == row]
        counts = (int(count[indices[0]].max()) for count in (tuner.steps, tuner.nonfinite_steps))
        yield _describe_tuner(groups, indices, *counts)
    if skipped := int(groups[0].get(SKIPPED, 0)):
        yield f"{_plural(skipped, 'step')} skipped for NaN or inf gradients"
    if any(FROZEN in group for group in groups):
        yield "frozen: S is no longer tuned"
    ours = _size(state, STATE_KEYS)
    yield f"{_size(state, None)} of state, {ours} of it Mechanic's"
    kinds = {str(e[DELTA].dtype).rpartition(".")[2] for e in state.values() if isinstance(e, dict) and DELTA in e}
    if kinds:
        yield f"Delta in {' and '.join(sorted(kinds))}"


def _describe_tuner(groups: list[Group], indices: list[int], steps: int, nonfinite: int) -> str:
    """One line: what a tuner has learned."""
    group = max((groups[index] for index in indices), key=last_rate)
    scale = float(scale_of(group))
    learned, rate = learned_rate_of(group), scale * last_rate(group)
    unnamed = {each[ROW] for each in groups if each.get("tuner") is None}
    name = group.get("tuner") or ("default" if len(unnamed) == 1 else f"group {indices[0]}")
    which = "" if len(indices) == len(groups) else f" (group {', '.join(map(str, indices))})"
    bad = f", {nonfinite} of them with NaN or inf gradients" if nonfinite else ""
    return (
        f"tuner {name!r}{which}: learned rate {learned:.4g} after {_plural(steps + nonfinite, 'step')}{bad} "
        f"(the peak lr passed was {float(group[PEAK_LR]):g}); S is now {scale:.4g}, the effective rate {rate:.4g}"
    )


def _size(state: dict[Any, Any], keys: tuple[str, ...] | None) -> str:
    entries = [entry for entry in state.values() if isinstance(entry, dict)]
    tensors = [v for e in entries for k, v in e.items() if isinstance(v, Tensor) and (keys is None or k in keys)]
    count = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
