"""Checkpoints that must be refused. Each function spoils a good one in place; False: there was nothing to spoil."""

import torch

from tests.campaign.torch_checks import DELTA


def _delta(state_dict):
    """The state of the first parameter that has a Delta."""
    return next((entry for entry in state_dict["state"].values() if DELTA in entry), None)


def _of_delta(change):
    def spoil(state_dict):
        entry = _delta(state_dict)
        if entry is not None:
            entry[DELTA] = change(entry[DELTA])
        return entry is not None

    return spoil


def _of_group(key, change):
    def spoil(state_dict):
        group = state_dict["param_groups"][-1]
        group[key] = change(group[key]) if key in group else change(None)
        return True

    return spoil


def _without_key(key):
    def spoil(state_dict):
        return state_dict["param_groups"][0].pop(key, None) is not None

    return spoil


def _with(value, *place):
    def change(tensor):
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return change


def _drop_delta(state_dict):
    entry = _delta(state_dict)
    if entry is None or len(entry) == 1:  # an empty state means that the parameter never had a gradient
        return False
    del entry[DELTA]
    return True


def _drop_groups(state_dict):
    state_dict["param_groups"] = []
    return True


def _drop_last_group(state_dict):
    state_dict["param_groups"] = state_dict["param_groups"][:-1]
    return True


def _confuse_rows(state_dict):
    groups = state_dict["param_groups"]
    first, last = groups[0], groups[-1]
    if first is last:
        return False
    last["mechanic_row"] = first["mechanic_row"] + (first["mechanic_row"] == last["mechanic_row"])
    return True


HOSTILE = {
    "Delta has another shape": _of_delta(lambda delta: torch.zeros(7, dtype=delta.dtype)),
    "Delta is a number": _of_delta(lambda delta: 0.5),
    "Delta is missing": _drop_delta,
    "tuner has other betas": _of_group("mechanic_tuner", _with(0.5, 0, 0)),
    "tuner lacks a row": _of_group("mechanic_tuner", lambda tuner: tuner[:-1].clone()),
    "tuner has a row more": _of_group("mechanic_tuner", lambda tuner: torch.cat([tuner, tuner[:1]])),
    "tuner is a list": _of_group("mechanic_tuner", lambda tuner: tuner.tolist()),
    "unit is text": _of_group("mechanic_unit", lambda unit: "one"),
    "unit is missing": _without_key("mechanic_unit"),
    "tuner is missing": _without_key("mechanic_tuner"),
    "a group has the row of another tuner": _confuse_rows,
    "format of the future": _of_group("mechanic_format", lambda number: number + 50),
    "another base": _of_group("mechanic_base", lambda name: "Adamish"),
    "no groups": _drop_groups,
    "a group is missing": _drop_last_group,
}
