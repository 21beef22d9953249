"""Is a checkpoint one that this optimizer can continue from? Everything is checked before anything changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mechanic.torch.kernels.rounding import is_half_precision
from mechanic.torch.layout import (
    DELTA,
    FORMAT,
    FROZEN,
    GROUP_KEYS,
    LAST_LR,
    OWN_ITERATES,
    PEAK_LR,
    RESIDUAL,
    ROW,
    SKIPPED,
    TUNER,
    Group,
    StateDict,
    params_of,
)
from mechanic.torch.probe import Shapes
from mechanic.torch.shards import is_dtensor, locals_of
from mechanic.tuner import TunerState


def is_plain(state_dict: StateDict) -> bool:
    """Whether it is the checkpoint of a bare optimizer, with no entry of Mechanic's."""
    in_groups = any(key in group for group in state_dict["param_groups"] for key in GROUP_KEYS)
    return not in_groups and not any(_holds_delta(entry) for entry in state_dict["state"].values())


def validate(state_dict: StateDict, groups: list[Group], expected: Mapping[Tensor, Shapes]) -> None:
    """Raise a ValueError that names the entry that does not fit.

    Args:
        state_dict: the checkpoint.
        groups: the param groups it is to be loaded into.
        expected: what the base is known to keep of each parameter; empty if it is not known.
    """
    for index, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        for key, value in saved.items():
            where = f"param_groups[{index}][{key!r}]"
            if key in ("foreach", "fused") and not (value is None or isinstance(value, bool)):
                raise ValueError(f"{where} must be None, True or False, got {value!r}")
            is_derived = key == "d" and isinstance(group.get("d"), Tensor)
            if key in group and key not in ("params", "tuner") and not key.startswith("mechanic_") and not is_derived:
                _check_option(where, value, group[key])
    if not is_plain(state_dict):
        _check_complete(state_dict, groups)
        _check_groups(state_dict["param_groups"], groups)
        _check_tuners(state_dict["param_groups"], groups)
        _check_has_state(state_dict, groups, expected)
    known = {key for key, _ in _saved_params(state_dict, groups)}
    if expected and (strangers := [key for key in state_dict["state"] if key not in known]):
        raise ValueError(f"state[{strangers[0]!r}] belongs to no parameter of the checkpoint's param_groups")
    for key, p in _saved_params(state_dict, groups):
        if entry := state_dict["state"].get(key):
            _check_state(f"state[{key!r}]", entry, p, expected.get(p, {}))


def require_options(options: Iterable[str], saved: list[Group], before: list[Group], after: list[Group]) -> None:
    """Raise if an option of the base is missing from a checkpoint, unless the base has filled in the same value."""
    for index, (old, former, group) in enumerate(zip(saved, before, after, strict=True)):
        for key in sorted(set(options) & set(former) - set(old)):
            if key not in group or group[key] != former[key]:
                raise ValueError(f"param_groups[{index}] of the checkpoint has no {key!r}; is it of another optimizer?")


def check_structure(state_dict: Any, groups: list[Group]) -> None:
    """Raise if it is not an optimizer's state dict, or has other groups or other numbers of parameters."""
    if not isinstance(state_dict, dict):
        raise ValueError(f"the checkpoint must be an optimizer's state_dict, got {type(state_dict).__name__}")
    saved_groups, state = (state_dict.get(key) for key in ("param_groups", "state"))
    if not isinstance(state, dict):
        raise ValueError(f"the checkpoint's 'state' must be a dict, got {type(state).__name__}")
    if not (isinstance(saved_groups, list) and all(isinstance(group, dict) for group in saved_groups)):
        raise ValueError("the checkpoint's 'param_groups' must be a list of dicts")
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=False)):
        if saved.get("mechanic_base", group["mechanic_base"]) != group["mechanic_base"]:
            raise ValueError(
                f"param_groups[{index}]['mechanic_base']: the checkpoint is of a Mechanic around "
                f"{saved['mechanic_base']}, this one is around {group['mechanic_base']}"
            )
    if len(saved_groups) != len(groups):
        raise ValueError(f"the checkpoint has {len(saved_groups)} param_groups, this optimizer has {len(groups)}")
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        params = saved.get("params")
        if not (isinstance(params, list) and all(isinstance(key, int | str) for key in params)):
            raise ValueError(f"param_groups[{index}]['params'] must be a list of numbers, got {params!r}")
        if len(params) != (here := len(group["params"])):
            raise ValueError(f"param_groups[{index}]['params'] has {len(params)} parameters, the group here has {here}")
    known: set[Any] = set(params_of(saved_groups))
    for key, entry in state.items():
        if isinstance(key, int) and key not in known:
            raise ValueError(f"state[{key}] belongs to no parameter of the checkpoint's param_groups")
        if key in known and not isinstance(entry, dict):
            raise ValueError(f"state[{key!r}] must be a dict, got {type(entry).__name__}")


def _check_option(where: str, saved: Any, here: Any) -> None:
    """Compare the type of an option of the base with that of the value it replaces."""
    if _is_number(here) and not isinstance(here, bool):
        if not _is_number(saved) or (math.isfinite(here) and not math.isfinite(saved)):
            raise ValueError(f"{where} must be a finite number, got {saved!r}")
    elif isinstance(here, bool):
        if isinstance(saved, Tensor) or saved not in (True, False):
            raise ValueError(f"{where} must be True or False, got {saved!r}")
    elif here is None:
        if not (saved is None or isinstance(saved, bool | str) or _is_number(saved)):
            raise ValueError(f"{where} is None here, got {saved!r}")
    elif isinstance(here, tuple | list):
        if not isinstance(saved, tuple | list) or len(saved) != len(here):
            raise ValueError(f"{where} must be {len(here)} values, got {saved!r}")
        for index, (one, other) in enumerate(zip(saved, here, strict=True)):
            _check_option(f"{where}[{index}]", one, other)
    elif isinstance(here, str) and not (saved is None or isinstance(saved, str)):
        raise ValueError(f"{where} must be a string, got {saved!r}")


def _check_groups(saved_groups: list[Group], groups: list[Group]) -> None:
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        where = f"param_groups[{index}]"
        if (OWN_ITERATES in saved) != (OWN_ITERATES in group):
            had, has = (OWN_ITERATES in g for g in (saved, group))
            raise ValueError(
                f"{where}['mechanic_own_iterates']: the checkpoint was made with own_iterates={had}, "
                f"this optimizer has own_iterates={has}"
            )
        _check_tuner(f"{where}['mechanic_tuner']", saved[TUNER], group[TUNER])
        _whole_number(f"{where}['mechanic_row']", saved[ROW])
        _whole_number(f"{where}['mechanic_skipped']", saved.get(SKIPPED, 0))
        for key in (PEAK_LR, FROZEN):
            value = saved.get(key, 1.0)
            if isinstance(value, bool) or not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{where}[{key!r}] must be a positive number, got {value!r}")
        if not (_is_number(lr := saved.get(LAST_LR, 0.0)) and math.isfinite(lr)):
            raise ValueError(f"{where}['mechanic_lr'] must be a finite number, got {lr!r}")


def _check_tuner(where: str, saved: Any, here: Tensor) -> None:
    rows = 1 + len(TunerState._fields)
    if isinstance(saved, Tensor):
        _require_finite(where, saved)
    if not (isinstance(saved, Tensor) and saved.is_floating_point() and saved.ndim == 2 and len(saved) == rows):
        kind = f"of shape {tuple(saved.shape)}" if isinstance(saved, Tensor) else repr(saved)
        raise ValueError(f"{where} must be a floating-point tensor of {rows} rows, got one {kind}")
    betas, betas_here = saved[0].tolist(), here[0].tolist()
    if len(betas) != len(betas_here) or any(abs(a - b) > 1e-7 for a, b in zip(betas, betas_here, strict=True)):
        raise ValueError(f"{where} was tuned with betas {betas}, this optimizer has {betas_here}")
    if bool((saved < 0).any()):
        raise ValueError(f"{where} holds numbers that are negative")


def _check_tuners(saved_groups: list[Group], groups: list[Group]) -> None:
    """Groups that share a tuner must share it in both, and agree on it; names that were given must be the same."""
    first_saved: dict[int, int] = {}
    first_here: dict[int, int] = {}
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        where = f"param_groups[{index}]"
        name, name_here = (g.get("tuner") for g in (saved, group))
        if name != name_here:
            raise ValueError(f"{where}['tuner'] was {name!r} when saved, here it is {name_here!r}")
        leader = first_saved.setdefault(int(saved[ROW]), index)
        leader_here = first_here.setdefault(group[ROW], index)
        if leader != leader_here:
            raise ValueError(
                f"{where}['mechanic_row']: it shared the tuner of group {leader} when saved, here it has that of group "
                f"{leader_here}; group the parameters as they were when saved"
            )
        for key in (TUNER, PEAK_LR, FROZEN):
            first = saved_groups[leader].get(key)
            same = first.equal(saved[key]) if isinstance(first, Tensor) else first == saved.get(key)
            if not same:
                raise ValueError(f"{where}[{key!r}] differs from that of group {leader}, whose tuner it shares")
    if len({FROZEN in group for group in saved_groups}) > 1:
        raise ValueError("some of the checkpoint's param_groups have 'mechanic_frozen' and some do not")


def _check_complete(state_dict: StateDict, groups: list[Group]) -> None:
    saved_groups, state = state_dict["param_groups"], state_dict["state"]
    for index, group in enumerate(saved_groups):
        saved = _whole_number(f"param_groups[{index}]['mechanic_format']", group.get("mechanic_format", FORMAT))
        if saved != FORMAT:
            raise ValueError(
                f"the checkpoint has mechanic_format {saved}, this version reads {FORMAT}; upgrade mechanic"
            )
    frozen = FROZEN in saved_groups[0]
    has_residuals = any(isinstance(entry, dict) and RESIDUAL in entry for entry in state.values())
    missing = [
        f"param_groups[{index}][{key!r}]"
        for index, group in enumerate(saved_groups)
        for key in GROUP_KEYS
        if key not in group
    ]
    for key, p in _saved_params(state_dict, groups):
        # A parameter without any state never had a gradient, and so has no Delta either.
        wanted = [DELTA] * (not frozen) + [RESIDUAL] * (has_residuals and is_half_precision(p.dtype))
        if entry := state.get(key):
            missing += [f"state[{key!r}][{name!r}]" for name in wanted if name not in entry]
    if missing:
        raise ValueError(
            f"the checkpoint has some of Mechanic's entries but not {', '.join(missing)}; "
            "load it whole, or remove every mechanic_* entry to start with a fresh tuner"
        )


def _check_has_state(state_dict: StateDict, groups: list[Group], expected: Mapping[Tensor, Shapes]) -> None:
    """A tuner whose scale is not 0 must have some parameter with state.

    It has none if all parameters that it has moved were removed from the optimizer. Such a run looks the same as a
    checkpoint that has lost its state, so both are refused.
    """
    scales = 1 + TunerState._fields.index("scales")  # after the betas
    learned: dict[int, int] = {}  # by row, the first group
    for index, group in enumerate(state_dict["param_groups"]):
        if bool(group[TUNER][scales].any()):
            learned.setdefault(int(group[ROW]), index)
    for row, index in learned.items():
        sharing = [group for group in state_dict["param_groups"] if int(group[ROW]) == row]
        keys: set[Any] = set(params_of(sharing))
        frozen = FROZEN in sharing[0]
        keeps = not frozen or any(expected.get(p) for key, p in _saved_params(state_dict, groups) if key in keys)
        if keeps and not any(state_dict["state"].get(key) for key in keys):
            raise ValueError(
                f"the tuner of param_groups[{index}] has learned from steps, but none of its parameters has a 'state'; "
                "load the checkpoint whole"
            )


def _check_state(where: str, entry: dict[str, Any], p: Tensor, expected: Shapes) -> None:
    for name, value in entry.items():
        if _holds(value, torch.isnan):
            raise ValueError(f"{where}[{name!r}] holds NaN")
    for name in (DELTA, RESIDUAL):
        if name not in entry:
            continue
        value = entry[name]
        if not (isinstance(value, Tensor) and value.shape == p.shape):
            kind = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{where}[{name!r}] must be a tensor of shape {tuple(p.shape)}, got one {kind}")
        if value.is_complex() != p.is_complex() or not (value.is_complex() or value.is_floating_point()):
            raise ValueError(f"{where}[{name!r}] has dtype {value.dtype}, and the parameter {p.dtype}")
        if name == DELTA and is_half_precision(value.dtype) and value.dtype != torch.bfloat16:
            raise ValueError(f"{where}[{name!r}] has dtype {value.dtype}, and is kept in bfloat16 or at least float32")
        _require_finite(f"{where}[{name!r}]", value)
    for name, shape in expected.items():
        if name not in entry:
            raise ValueError(f"{where}[{name!r}] is missing")
        value = entry[name]
        if isinstance(value, Tensor):
            _require_finite(f"{where}[{name!r}]", value)
        fits = isinstance(value, Tensor) and tuple(value.shape) == shape
        if not (fits or shape is None or (shape == () and _is_number(value))):
            kind = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{where}[{name!r}] must be a tensor of shape {shape}, got one {kind}")


def _require_finite(where: str, value: Tensor) -> None:
    if value.is_meta or value.layout != torch.strided:
        raise ValueError(f"{where} must be a dense tensor with data, got {value.layout} on {value.device}")
    if _holds(value, lambda numbers: ~torch.isfinite(numbers)):
        raise ValueError(f"{where} holds numbers that are not finite")


def _holds(value: Any, test: Callable[[Tensor], Tensor]) -> bool:
    """Whether some number of a tensor passes a test; of a DTensor, of what this rank holds.

    Tensors of a class of their own, such as a state in 4 bits, may not know the test's operators.
    """
    if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
        return False
    (local,) = locals_of([value], sharded=is_dtensor(value))
    return type(local) in (Tensor, torch.nn.Parameter) and bool(test(local).any())


def _saved_params(state_dict: StateDict, groups: list[Group]) -> list[tuple[Any, Tensor]]:
    return list(zip(params_of(state_dict["param_groups"]), params_of(groups), strict=True))


def _holds_delta(entry: Any) -> bool:
    return isinstance(entry, dict) and DELTA in entry


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not (value.is_complex() or value.is_meta) and value.layout == torch.strided
    return isinstance(value, int | float)


def _whole_number(where: str, value: Any) -> int:
    if not (_is_number(value) and math.isfinite(value) and value == int(value) and value >= 0):
        raise ValueError(f"{where} must be a whole number, got {value!r}")
    return int(value)
