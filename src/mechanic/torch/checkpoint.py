"""Continue from a checkpoint. :mod:`mechanic.torch.layout` says which key holds what.

What is Mechanic's is checked as a whole before anything changes. If the base cannot load its part, nothing has changed
either.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.buckets import Options, seen_dtypes
from mechanic.torch.delta import decoded, is_half_precision
from mechanic.torch.layout import (
    DELTA,
    DELTA_SCALES,
    FORMAT,
    FROZEN,
    GROUP_KEYS,
    LAST_LR,
    OWN_ITERATES,
    PEAK_LR,
    RESIDUAL,
    ROW,
    SKIPPED,
    STATE_KEYS,
    TUNER,
    Group,
    StateDict,
    params_of,
)
from mechanic.torch.shards import local
from mechanic.torch.together import options_of, stand_in, take_over
from mechanic.torch.tuners import peak_lr_of, remove_tuners, warn_user
from mechanic.torch.wrapped import Wrapped
from mechanic.tuner import TunerState


def begin(wrapped: Wrapped[Any]) -> None:
    """Give every group a tuner, once everything has been checked."""
    wrapped.assign_tuners()
    try:
        for p, dtype in seen_dtypes(wrapped.base, _options(wrapped)).items():  # some bases have state from the start
            if is_half_precision(p.dtype) and (entry := wrapped.base.state.get(p)):
                entry.update({k: v.to(dtype) for k, v in entry.items() if isinstance(v, Tensor) and v.shape == p.shape})
    except Exception:
        remove_tuners(wrapped.groups)
        raise
    wrapped.complete_state()
    wrapped.watch_direct_steps()


def state_dict_of(base: Optimizer) -> StateDict:
    """The state dict of a base with what Mechanic keeps beside it: references, but for Deltas that are decoded."""
    state_dict = base.state_dict()
    state = state_dict["state"]
    if any(isinstance(entry, dict) and DELTA_SCALES in entry for entry in state.values()):
        state = {key: decoded(entry) if isinstance(entry, dict) else entry for key, entry in state.items()}
        state_dict = {**state_dict, "state": state}
    return state_dict


def load_checked(wrapped: Wrapped[Any], state_dict: StateDict) -> None:
    """Check a checkpoint as a whole, then load it. If anything fails, the optimizer is left as it was."""
    groups = wrapped.groups
    _check_structure(state_dict, groups)
    is_plain = not _has_entries(state_dict)
    if not is_plain:
        _check_complete(state_dict, groups)
        _check_groups(state_dict["param_groups"], groups)
        _check_tuners(state_dict["param_groups"], groups)
        _check_has_state(state_dict)
        _check_state(state_dict, groups)
    elif wrapped.peak_lr is None:
        peak_lr_of(state_dict["param_groups"])  # raises if there is none
    before = vars(wrapped.base).copy(), vars(wrapped).copy()
    try:
        _load(wrapped, state_dict)
    except BaseException:
        for owner, variables in zip((wrapped.base, wrapped), before, strict=True):
            vars(owner).clear()
            vars(owner).update(variables)
        raise
    if is_plain:
        warn_user("the checkpoint is a plain optimizer's: its state is kept, and Mechanic starts with a fresh tuner")


def _options(wrapped: Wrapped[Any]) -> Options:
    return Options(wrapped.delta, wrapped.own_iterates)


def _load(wrapped: Wrapped[Any], state_dict: StateDict) -> None:
    former = wrapped.groups
    of_base, ours = _split(state_dict, d_is_ours=wrapped.shows_scales)
    try:
        _load_base(wrapped, of_base)
    except Exception as error:
        name = type(wrapped.base).__name__
        raise ValueError(f"{name} could not load the checkpoint's state: {type(error).__name__}: {error}") from error
    _require_options(options_of(wrapped.base), state_dict["param_groups"], former, wrapped.groups)
    for saved, p in zip(params_of(state_dict["param_groups"]), params_of(wrapped.groups), strict=True):
        if entries := ours.get(saved):
            # One by one, so that no more than one is on the device in float32 if Delta is stored in fewer bytes.
            wrapped.keep(p, {key: tensor.to(p.device) for key, tensor in entries.items()})
    for group, before in zip(wrapped.groups, former, strict=True):
        if ROW in group:
            group[ROW] = before[ROW]
        if "tuner" in before:
            group["tuner"] = before["tuner"]
    wrapped.observed = None
    wrapped.forget_parameters()
    wrapped.assign_tuners()
    wrapped.complete_state()
    wrapped.note_resume(former)
    has_stepped = any(group[TUNER][1:].any() for group in wrapped.groups)
    wrapped.peak_is_settled = has_stepped or wrapped.peak_lr is not None


def _load_base(wrapped: Wrapped[Any], state_dict: StateDict) -> None:
    """Let a stand-in for the base load, with parameters in the dtypes that it steps on, which torch casts state to."""
    base: Any = wrapped.base
    dtypes = seen_dtypes(base, _options(wrapped))
    seen = {p: torch.empty(0, dtype=dtype, device=p.device) if dtype != p.dtype else p for p, dtype in dtypes.items()}
    groups = [{**group, "params": [seen[p] for p in group["params"]]} for group in base.param_groups]
    shown = stand_in(base, groups, lambda _: defaultdict(dict))
    shown.load_state_dict(state_dict)
    originals = {tensor: p for p, tensor in seen.items()}
    loaded = [
        {**group, "params": former["params"]}
        for group, former in zip(shown.param_groups, base.param_groups, strict=True)
    ]
    state = {originals.get(key, key) if isinstance(key, Tensor) else key: entry for key, entry in shown.state.items()}
    take_over(shown, base)
    base.param_groups, base.state = loaded, defaultdict(dict, state)


def _split(state_dict: StateDict, *, d_is_ours: bool) -> tuple[StateDict, dict[Any, dict[str, Tensor]]]:
    """Separate Mechanic's tensors from the base's, whose ``load_state_dict`` would cast them to the parameter's dtype.

    Returns a shallow copy of the state dict without them, and Mechanic's tensors by parameter id. The argument does
    not change. ``d`` is dropped unless it is the base's own: it is computed from the tuner. So are the scales of codes:
    torch's flattened checkpoints get every key that the optimizer has in memory.
    """
    ours = {}
    state = {}
    for key, entry in state_dict["state"].items():
        if isinstance(entry, dict):
            ours[key] = {name: entry[name] for name in (DELTA, RESIDUAL) if name in entry}
            entry = {name: value for name, value in entry.items() if name not in STATE_KEYS}
        state[key] = entry
    dropped = {"d"} if d_is_ours else set()
    groups = [{k: v for k, v in group.items() if k not in dropped} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}, ours


# What is checked.


def _has_entries(state_dict: StateDict) -> bool:
    """Whether it is not the checkpoint of a bare optimizer: it has some entry of Mechanic's."""
    in_groups = any(key in group for group in state_dict["param_groups"] for key in GROUP_KEYS)
    return in_groups or any(isinstance(entry, dict) and DELTA in entry for entry in state_dict["state"].values())


def _require_options(options: Iterable[str], saved: list[Group], before: list[Group], after: list[Group]) -> None:
    """Raise if an option of the base is missing from a checkpoint, unless the base has filled in the same value."""
    for index, (old, former, group) in enumerate(zip(saved, before, after, strict=True)):
        for key in sorted(set(options) & set(former) - set(old)):
            if key not in group or group[key] != former[key]:
                raise ValueError(f"param_groups[{index}] of the checkpoint has no {key!r}; is it of another optimizer?")


def _check_structure(state_dict: Any, groups: list[Group]) -> None:
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
        if key not in known and str(key).isdigit():
            raise ValueError(f"state[{key!r}] belongs to no parameter of the checkpoint's param_groups")
        if key in known and not isinstance(entry, dict):
            raise ValueError(f"state[{key!r}] must be a dict, got {type(entry).__name__}")


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


def _check_has_state(state_dict: StateDict) -> None:
    """Raise if a tuner that has learned has no Delta: its parameters' state was lost, or they were all removed."""
    scales = 1 + TunerState._fields.index("scales")  # after the betas
    keys_by_row: dict[int, list[Any]] = {}
    first: dict[int, int] = {}
    for index, group in enumerate(state_dict["param_groups"]):
        if FROZEN not in group and bool(group[TUNER][scales].any()):
            first.setdefault(int(group[ROW]), index)
            keys_by_row.setdefault(int(group[ROW]), []).extend(group["params"])
    for row, keys in keys_by_row.items():
        if not any(state_dict["state"].get(key) for key in keys):
            raise ValueError(
                f"the tuner of param_groups[{first[row]}] has learned from steps, but none of its parameters has a "
                "'state'; load the checkpoint whole"
            )


def _check_state(state_dict: StateDict, groups: list[Group]) -> None:
    for key, p in _saved_params(state_dict, groups):
        for name in (DELTA, RESIDUAL):
            entry = state_dict["state"].get(key) or {}
            if name not in entry:
                continue
            where, value = f"state[{key!r}][{name!r}]", entry[name]
            if not (isinstance(value, Tensor) and value.shape == p.shape):
                kind = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(f"{where} must be a tensor of shape {tuple(p.shape)}, got one {kind}")
            if value.is_complex() != p.is_complex() or not (value.is_complex() or value.is_floating_point()):
                raise ValueError(f"{where} has dtype {value.dtype}, and the parameter {p.dtype}")
            if name == DELTA and value.dtype == torch.float16:
                raise ValueError(f"{where} has dtype {value.dtype}, and is kept in bfloat16 or at least float32")
            _require_finite(where, value)


def _require_finite(where: str, value: Tensor) -> None:
    if value.is_meta or value.layout != torch.strided:
        raise ValueError(f"{where} must be a dense tensor with data, got {value.layout} on {value.device}")
    if not bool(local(value).isfinite().all()):
        raise ValueError(f"{where} holds numbers that are not finite")


def _saved_params(state_dict: StateDict, groups: list[Group]) -> list[tuple[Any, Tensor]]:
    return list(zip(params_of(state_dict["param_groups"]), params_of(groups), strict=True))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not (value.is_complex() or value.is_meta) and value.layout == torch.strided
    return isinstance(value, int | float)


def _whole_number(where: str, value: Any) -> int:
    if not (_is_number(value) and math.isfinite(value) and value == int(value) and value >= 0):
        raise ValueError(f"{where} must be a whole number, got {value!r}")
    return int(value)
