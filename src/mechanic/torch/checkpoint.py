"""Continue from a checkpoint. :mod:`mechanic.torch.layout` says which key holds what."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch import validation
from mechanic.torch.layout import DELTA_SCALES, ROW, STATE_KEYS, TUNER, StateDict, params_of
from mechanic.torch.probe import expected_state
from mechanic.torch.stored import decoded
from mechanic.torch.together import options_of
from mechanic.torch.tuners import MissingParameterCheck, peak_lr_of
from mechanic.torch.warn import warn_user
from mechanic.torch.wrapped import Wrapped


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
    validation.check_structure(state_dict, groups)
    state_dict = _without_scales_of_codes(state_dict)
    validation.validate(state_dict, groups, expected_state(wrapped.base, state_dict["param_groups"]))
    is_plain = validation.is_plain(state_dict)
    if is_plain and wrapped.peak_lr is None:
        peak_lr_of(state_dict["param_groups"])  # raises if there is none
    before = vars(wrapped.base).copy(), vars(wrapped).copy()
    try:
        _load(wrapped, state_dict)
    except Exception:
        for owner, variables in zip((wrapped.base, wrapped), before, strict=True):
            vars(owner).clear()
            vars(owner).update(variables)
        raise
    if is_plain:
        warn_user("the checkpoint is a plain optimizer's: its state is kept, and Mechanic starts with a fresh tuner")


def _without_scales_of_codes(state_dict: StateDict) -> StateDict:
    """A checkpoint has none, but torch's flattened ones get every key that the optimizer has in memory."""
    state = {
        key: {k: v for k, v in entry.items() if k != DELTA_SCALES} if isinstance(entry, dict) else entry
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _load(wrapped: Wrapped[Any], state_dict: StateDict) -> None:
    former = wrapped.groups
    of_base, ours = _split(state_dict, d_is_ours=wrapped.shows_scales)
    try:
        with wrapped.as_it_steps():
            wrapped.base.load_state_dict(of_base)
    except Exception as error:
        name = type(wrapped.base).__name__
        raise ValueError(f"{name} could not load the checkpoint's state: {type(error).__name__}: {error}") from error
    validation.require_options(options_of(wrapped.base), state_dict["param_groups"], former, wrapped.groups)
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
    wrapped.is_linear_in_lr = None
    wrapped.missing = MissingParameterCheck()
    wrapped.assign_tuners()
    wrapped.complete_state()
    has_stepped = any(group[TUNER][1:].any() for group in wrapped.groups)
    wrapped.peak_is_settled = has_stepped or wrapped.peak_lr is not None


def _split(state_dict: StateDict, *, d_is_ours: bool) -> tuple[StateDict, dict[Any, dict[str, Tensor]]]:
    """Separate Mechanic's tensors from the base's, whose ``load_state_dict`` would cast them to the parameter's dtype.

    Returns a shallow copy of the state dict without them, and Mechanic's tensors by parameter id. The argument does
    not change. ``d`` is dropped unless it is the base's own: it is computed from the tuner.
    """
    ours = {}
    state = {}
    for key, entry in state_dict["state"].items():
        if isinstance(entry, dict):
            ours[key] = {name: entry[name] for name in STATE_KEYS if name in entry}
            entry = {name: value for name, value in entry.items() if name not in STATE_KEYS}
        state[key] = entry
    dropped = {"d"} if d_is_ours else set()
    groups = [{k: v for k, v in group.items() if k not in dropped} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}, ours
