"""Continue from a checkpoint. :mod:`mechanic.torch.layout` says which key holds what.

A checkpoint is compared with this optimizer before it is loaded. Whatever fails, what the optimizer held is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch import base as bases
from mechanic.torch.buckets import decoded, kept_of
from mechanic.torch.layout import (
    DELTA,
    FROZEN,
    GROUP_KEYS,
    RESIDUAL,
    ROW,
    SAME,
    STATE_KEYS,
    TUNER,
    Group,
    StateDict,
    is_half_precision,
    params_of,
    with_all_rows,
)
from mechanic.torch.wrapped import Wrapped


def begin(wrapped: Wrapped[Any]) -> None:
    """Give every group a tuner, and all state that the base has from the start a Delta."""
    wrapped.assign_tuners()
    _put_beside(wrapped, {})


def _put_beside(wrapped: Wrapped[Any], saved: dict[Tensor, dict[str, Tensor]]) -> None:
    """Put Delta beside all state that the base has, from a checkpoint or new, so that every checkpoint is complete.

    Adagrad has state before its first step. torch.distributed.checkpoint makes no step to fill in the rest then.
    """
    for p in wrapped.params:
        entry = saved.get(p, {})
        # One by one, so that no more than one is on the device in float32 if Delta is stored in fewer bytes.
        found = {name: _in_order_of(p, entry[name].detach()) for name in (DELTA, RESIDUAL) if name in entry}
        if found or wrapped.base.state.get(p):
            wrapped.base.state[p].update(kept_of(p, found, wrapped.delta, is_frozen=wrapped.is_frozen))


def _in_order_of(p: Tensor, saved: Tensor) -> Tensor:
    """On the device of a parameter and in its order in memory, which decides how Delta is rounded."""
    found = saved.to(p.device)
    return found if found.stride() == p.stride() else torch.empty_like(p, dtype=found.dtype).copy_(found)


def state_dict_of(base: Optimizer) -> StateDict:
    """The state dict of a base with what Mechanic keeps beside it: references, but for Deltas that are decoded."""
    return _with_state(base.state_dict(), decoded)


def _with_state(state_dict: StateDict, change: Callable[[StateDict], StateDict]) -> StateDict:
    """A state dict in which the state of every parameter is changed."""
    state = {key: change(entry) if isinstance(entry, dict) else entry for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": state}


def load_checked(wrapped: Wrapped[Any], state_dict: StateDict) -> None:
    """Load a checkpoint. If it does not fit, or anything fails, the optimizer is left as it was."""
    before = vars(wrapped.base).copy(), vars(wrapped).copy()
    try:
        is_ours = _load(wrapped, state_dict)
    except BaseException as error:
        for owner, variables in zip((wrapped.base, wrapped), before, strict=True):
            vars(owner).clear()
            vars(owner).update(variables)
        if isinstance(error, ValueError) or not isinstance(error, Exception):
            raise
        raise ValueError(f"the checkpoint could not be loaded: {type(error).__name__}: {error}") from error
    if not is_ours:
        wrapped.told.discard("plain")  # every such load is told
        wrapped.warn_once(
            "plain", "the checkpoint is a plain optimizer's: its state is kept, and Mechanic starts with a fresh tuner"
        )


def _load(wrapped: Wrapped[Any], state_dict: StateDict) -> bool:
    """Load a checkpoint. Returns whether it is a Mechanic's."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("this is no optimizer's state_dict, a dict with 'state' and 'param_groups'; is it a model's?")
    state_dict = {**state_dict, "param_groups": [with_all_rows(group) for group in state_dict["param_groups"]]}
    state, groups, former = state_dict["state"], state_dict["param_groups"], wrapped.groups
    saved = {p: state.get(key) or {} for key, p in zip(params_of(groups), wrapped.params, strict=False)}
    is_ours = any(str(key).startswith("mechanic_") for entry in (*groups, *saved.values()) for key in entry)
    if is_ours:
        _compare_groups(groups, former)
    is_tuned = is_ours and not any(FROZEN in group for group in groups)
    sizes, sizes_here = ([len(group["params"]) for group in found] for found in (groups, former))
    _require_same("the parameters in each of param_groups", sizes, sizes_here)
    _compare_state(groups, saved, is_tuned=is_tuned)
    # The base would cast Mechanic's tensors to the dtype of the parameters.
    of_base = _with_state(state_dict, lambda entry: {k: v for k, v in entry.items() if k not in STATE_KEYS})
    dtypes = bases.seen_dtypes(wrapped.base, wrapped.delta, own_iterates=wrapped.own_iterates)
    bases.load(wrapped.base, of_base, dtypes)
    for group, before in zip(wrapped.groups, former, strict=True):
        group.update({key: before[key] for key in (ROW, "tuner") if key in before})
    wrapped.observed, wrapped.resumed = None, {}
    wrapped.known, wrapped.checked = {}, []  # others may be in the groups now
    wrapped.assign_tuners()
    _put_beside(wrapped, saved)
    for name, sharing in wrapped.by_tuner().items():
        moved = [DELTA in saved[p] for p in params_of(sharing)]
        if moved and not any(moved) and not wrapped.is_frozen and wrapped.scales()[name] > 0:
            raise ValueError(f"tuner {name!r} has learned, but 'state' lacks its {DELTA!r}; load the whole checkpoint")
    if is_ours:  # else the tuner is fresh, and learns in the units that it finds
        wrapped.note_resume(former)
    wrapped.peak_is_settled = any(group[TUNER][1:].any() for group in wrapped.groups)
    return is_ours


def _compare_groups(saved_groups: list[Group], groups: list[Group]) -> None:
    """Raise at the first entry of Mechanic's that a group of the checkpoint lacks, or that differs here."""
    rows, rows_here = ([group.get(ROW) for group in found] for found in (saved_groups, groups))
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=False)):
        where = f"param_groups[{index}]"
        for key in SAME:
            _require_same(f"{where}[{key!r}]", saved.get(key), group.get(key))
        for key in GROUP_KEYS:
            _require_same(f"{where}[{key!r}]", "one" if key in saved else "none", "one")
        betas = (found[TUNER][0].cpu().double().round(decimals=7).tolist() for found in (saved, group))
        _require_same(f"the betas in {where}['mechanic_tuner']", *betas)
        _require_same(f"{where}['mechanic_tuner']", _kind_of(saved[TUNER]), _kind_of(group[TUNER]))
        _require_same(f"the first group with the tuner of {where}", rows.index(saved[ROW]), rows_here.index(group[ROW]))


def _compare_state(saved_groups: list[Group], saved: dict[Tensor, dict[str, Any]], *, is_tuned: bool) -> None:
    """Raise at the first entry of Mechanic's that is missing beside state of the base, or has another shape."""
    kinds = [name for name in (DELTA, RESIDUAL) if any(name in entry for entry in saved.values())]
    if is_tuned and DELTA not in kinds:
        kinds.append(DELTA)
    for key, (p, entry) in zip(params_of(saved_groups), saved.items(), strict=True):
        for name in kinds if entry else ():  # a parameter without any state never had a gradient
            if name == DELTA or is_half_precision(p.dtype):
                _require_same(f"state[{key!r}][{name!r}]", _kind_of(entry.get(name, "none")), _kind_of(p))


def _require_same(where: str, saved: Any, here: Any) -> None:
    if saved != here:
        raise ValueError(
            f"{where}: the checkpoint has {saved}, this optimizer has {here}; load the whole checkpoint into an "
            "optimizer that is built as it was when saved, and upgrade mechanic if a newer one saved it"
        )


def _kind_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return f"{'codes' if value.dtype == torch.int8 else 'a tensor'} of shape {tuple(value.shape)}"
