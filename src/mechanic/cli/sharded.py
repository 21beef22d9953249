"""Read the optimizers of a ``torch.distributed.checkpoint`` folder, without its weights.

torch unpickles the index of such a folder and its small values as they are. Here both are restricted: the index to the
classes that describe a checkpoint, the values to what ``torch.load(weights_only=True)`` takes.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

INDEX = ".metadata"
_DESCRIPTIONS = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


def is_sharded(path: Path) -> bool:
    return (path / INDEX).is_file()


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in ("torch", _DESCRIPTIONS) else None
        is_description = isinstance(found, type) and found.__module__ == _DESCRIPTIONS
        if is_description or isinstance(found, torch.dtype) or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index names {module}.{name}, which no index needs")


def read_sharded(path: Path) -> Any:
    """Its content: groups as they are, and all other tensors on the meta device, where they take no memory."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return index

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: Any) -> None:
            if read_item.type != LoadItemType.BYTE_IO:
                raise ValueError(f"{read_item.dest_index.fqn} is no small value")
            with contextlib.suppress(pickle.UnpicklingError):  # left out; nothing of Mechanic's needs more
                found[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    try:
        with open(path / INDEX, "rb") as file:
            index: Metadata = _IndexUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise SystemExit(f"{path} could not be read: {error}") from error
    paths: dict[str, tuple[Any, ...]] = index.planner_data or {}
    wanted: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for key, entry in index.state_dict_metadata.items():
        is_of_group = "param_groups" in _parts(key, paths)
        if isinstance(entry, TensorStorageMetadata):
            device = "cpu" if is_of_group else "meta"
            found[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        if is_of_group:
            wanted[key] = found.get(key)
    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if wanted:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process
            load(wanted, storage_reader=Reader(path), planner=planner, no_dist=True)
    return _nested({_parts(key, paths): value for key, value in found.items()})


def _parts(key: str, paths: dict[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    path = tuple(paths[key]) if key in paths else (key,)
    *outer, last = path
    for kind in ("state", "param_groups"):  # of flatten_optimizer_state_dict=True: "state.layer.weight.exp_avg"
        if isinstance(last, str) and last.startswith(f"{kind}."):
            return (*outer, kind, *last.removeprefix(f"{kind}.").rsplit(".", 1))
    return path


def _nested(flat: dict[tuple[Any, ...], Any]) -> Any:
    """Dicts in dicts from the paths of their values; dicts whose keys are 0, 1, 2, ... become lists."""
    inside: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in flat.items():
        inside.setdefault(path[0], {})[path[1:]] = value
    made = {key: values[()] if () in values else _nested(values) for key, values in inside.items()}
    if isinstance(groups := made.get("param_groups"), dict):
        made["param_groups"] = _joined(groups)
    return [made[key] for key in sorted(made)] if made and set(made) == set(range(len(made))) else made


def _joined(by_parameter: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups from entries that were stored for every parameter apart: those with the same options are one."""
    groups: dict[str, dict[str, Any]] = {}
    for name, entries in by_parameter.items():
        options = {key: value for key, value in sorted(entries.items()) if not isinstance(value, torch.Tensor)}
        groups.setdefault(repr(options), {**entries, "params": []})["params"].append(name)
    return list(groups.values())
