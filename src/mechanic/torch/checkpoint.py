"""What Mechanic keeps in a checkpoint, and what it accepts from one.

Everything lives where PyTorch's checkpoint routes look: Delta beside the base's own state of each
parameter, the tuner in each param group. Only tensors, ints and floats are stored, which is what
``torch.load(weights_only=True)`` and torch.distributed.checkpoint both take.

===================  ==========================  =====================================================
where                key                         what
===================  ==========================  =====================================================
``state[p]``         ``mechanic_delta``          Delta, shaped and placed like p, at least float32;
                                                 none once the scale is frozen
``state[p]``         ``mechanic_residual``       of half-precision p only: what rounding cut off
``param_groups[i]``  ``mechanic_format``         3, the number of this layout
``param_groups[i]``  ``mechanic_row``            which tuner the group belongs to
``param_groups[i]``  ``mechanic_tuner``          [10, n]: the betas, then the fields of TunerState
``param_groups[i]``  ``mechanic_unit``           the learning rate that counts as 1
``param_groups[i]``  ``mechanic_frozen``         S, where it has been frozen
``param_groups[i]``  ``mechanic_skipped``        how many steps were skipped, where any was
``param_groups[i]``  ``mechanic_own_iterates``   1, where the base steps on iterates of its own
``param_groups[i]``  ``d``                       S / unit, the factor that ``lr`` is really applied with
===================  ==========================  =====================================================
"""

from __future__ import annotations

from typing import Any

import torch

FORMAT = 3
"""1 had a tuner of seven rows, without the largest S so far and the number of steps; 2 had no largest learning rate."""

DELTA = "mechanic_delta"
RESIDUAL = "mechanic_residual"
STATE_KEYS = (DELTA, RESIDUAL)
GROUP_KEYS = ("mechanic_format", "mechanic_row", "mechanic_tuner", "mechanic_unit")
OPTIONAL_GROUP_KEYS = ("mechanic_frozen", "mechanic_skipped", "mechanic_own_iterates", "d")

StateDict = dict[str, Any]


def take_apart(state_dict: StateDict) -> tuple[StateDict, dict[Any, dict[str, torch.Tensor]]]:
    """Part Mechanic's tensors from the base's: its ``load_state_dict`` would cast them to the parameter's dtype.

    Returns a shallow copy of the state dict without them, and them by parameter id. The argument stays as it was.
    """
    own = {}
    state = {}
    for key, entry in state_dict["state"].items():
        if isinstance(entry, dict):
            own[key] = {name: entry[name] for name in STATE_KEYS if name in entry}
            entry = {name: value for name, value in entry.items() if name not in STATE_KEYS}
        state[key] = entry
    return {**state_dict, "state": state}, own


def upgraded(state_dict: StateDict) -> StateDict:
    """A shallow copy in today's format. A run from before anything was forgotten goes on without forgetting."""
    groups = []
    for group in state_dict["param_groups"]:
        saved = int(group.get("mechanic_format", FORMAT))
        if saved < FORMAT:
            tuner = group["mechanic_tuner"]  # the scales in row 4
            if saved == 1:
                largest_scale = torch.full_like(tuner[:1], float(tuner[4].sum()))
                many_steps = torch.full_like(tuner[:1], 1e9)
                tuner = torch.cat([tuner, largest_scale, many_steps])
            largest_rate = torch.full_like(tuner[:1], float(group["mechanic_unit"]))
            tuner = torch.cat([tuner, largest_rate])
            group = {**group, "mechanic_format": FORMAT, "mechanic_tuner": tuner}
        groups.append(group)
    return {**state_dict, "param_groups": groups}


def is_plain(state_dict: StateDict) -> bool:
    """Whether nothing of Mechanic's is in it: the checkpoint of a bare optimizer."""
    in_groups = any(key in group for group in state_dict["param_groups"] for key in GROUP_KEYS)
    return not in_groups and not any(_holds_delta(entry) for entry in state_dict["state"].values())


def validate(state_dict: StateDict, groups: list[dict[str, Any]]) -> None:
    """Raise a ValueError that names what does not fit, before anything has been changed."""
    saved_groups = state_dict["param_groups"]
    newest = max(int(group.get("mechanic_format", 0)) for group in saved_groups)
    if newest > FORMAT:
        raise ValueError(
            f"the checkpoint has mechanic_format {newest}, this version reads up to {FORMAT}; upgrade mechanic"
        )
    if missing := _missing_entries(state_dict):
        raise ValueError(
            f"the checkpoint has some of Mechanic's entries but not {', '.join(missing)}; "
            "load it whole, or remove every mechanic_* entry to start with a fresh tuner"
        )
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=False)):
        saved_betas, betas = (g["mechanic_tuner"][0].tolist() for g in (saved, group))
        if len(saved_betas) != len(betas) or any(abs(a - b) > 1e-7 for a, b in zip(saved_betas, betas, strict=True)):
            raise ValueError(f"param_groups[{index}] was tuned with betas {saved_betas}, this optimizer has {betas}")
        if ("mechanic_own_iterates" in saved) != ("mechanic_own_iterates" in group):
            had, has = ("mechanic_own_iterates" in g for g in (saved, group))
            raise ValueError(f"the checkpoint was made with own_iterates={had}, this optimizer has own_iterates={has}")
        if int(saved["mechanic_row"]) != group["mechanic_row"]:
            raise ValueError(
                f"param_groups[{index}] belonged to tuner {int(saved['mechanic_row'])}, "
                f"here it belongs to tuner {group['mechanic_row']}; group the parameters as they were when saved"
            )


def _missing_entries(state_dict: StateDict) -> list[str]:
    missing = [
        f"param_groups[{index}][{key!r}]"
        for index, group in enumerate(state_dict["param_groups"])
        for key in GROUP_KEYS
        if key not in group
    ]
    # A parameter without any state never had a gradient, and so has no Delta either.
    return missing + [
        f"state[{key!r}][{DELTA!r}]"
        for group in state_dict["param_groups"]
        for key in group["params"]
        if "mechanic_frozen" not in group
        if (entry := state_dict["state"].get(key)) and not _holds_delta(entry)
    ]


def _holds_delta(entry: Any) -> bool:
    return isinstance(entry, dict) and DELTA in entry
