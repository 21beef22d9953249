"""Checkpoints with one thing wrong in each, made from a good one: one of every kind."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.torch.hostile import Broken, fresh

StateDict = dict[str, Any]
Change = Callable[[StateDict], Any]


@dataclasses.dataclass(frozen=True)
class Mutation:
    what: str
    words: tuple[str, ...]  # a refusal has to contain one of them
    change: Change  # of a copy, in place
    may_load: bool = False  # if it then continues as the good one


def mutations(good: StateDict) -> list[Broken]:
    """All of one checkpoint that must be refused by name, and a few that do not matter."""
    changes = [*_of_structure(), *_of_groups(good), *_of_deltas(good), *_of_lost_state(good), *_of_pairs(good)]
    broken = [Broken(m.what, functools.partial(_changed, good, m.change), m.words, m.may_load) for m in changes]
    replaced = [("None", None), ("a list", [1]), ("a string", "hostile"), ("a tensor", torch.ones(2)), ("empty", {})]
    return broken + [
        Broken(f"the checkpoint is {what}", lambda v=value: v, ("state_dict",)) for what, value in replaced
    ]


def wrong_types(good: StateDict) -> list[Broken]:
    """What torch does not check either, and fails on: nothing has changed then."""
    last = len(good["param_groups"]) - 1
    first = next(iter(good["state"]))
    changes = {
        "state is None": lambda mutated: mutated.update(state=None),
        "state is a string": lambda mutated: mutated.update(state="hostile"),
        "param_groups is None": lambda mutated: mutated.update(param_groups=None),
        "param_groups has None in it": lambda mutated: mutated["param_groups"].__setitem__(last, None),
        "params of a group are None": lambda mutated: mutated["param_groups"][last].update(params=None),
        "params of a group have a list in them": lambda mutated: mutated["param_groups"][0]["params"].__setitem__(
            0, [0]
        ),
        "the tuner is None": lambda mutated: mutated["param_groups"][last].update(mechanic_tuner=None),
        "the tuner is a list": lambda mutated: mutated["param_groups"][last].update(mechanic_tuner=[1.0]),
        "the tuner has no data": _of_entry("param_groups", last, "mechanic_tuner", lambda tuner: tuner.to("meta")),
        "the unit is None": lambda mutated: mutated["param_groups"][last].update(mechanic_unit=None),
        "the unit is a string": lambda mutated: mutated["param_groups"][last].update(mechanic_unit="hostile"),
        "the format is a tensor": lambda mutated: mutated["param_groups"][last].update(mechanic_format=torch.ones(2)),
        "the state of a parameter is a list": lambda mutated: mutated["state"].update({first: [1.0]}),
        "the state of a parameter is a string": lambda mutated: mutated["state"].update({first: "hostile"}),
    }
    return [Broken(what, functools.partial(_changed, good, change), ("",)) for what, change in changes.items()]


def _changed(good: StateDict, change: Change) -> StateDict:
    mutated = fresh(good)
    change(mutated)
    return mutated


def _of_entry(container: str, index: Any, key: str, value_of: Callable[[Any], Any]) -> Change:
    """Put something else into an entry, computed from what is there; ``None`` removes it."""

    def change(state_dict: StateDict) -> None:
        entries = state_dict[container][index]
        if (value := value_of(entries.pop(key, None))) is not None:
            entries[key] = fresh(value)  # it may be a view of the good one

    return change


def _in(
    container: str, index: Any, key: str, kinds: dict[str, Callable[[Any], Any]], *words: str
) -> Iterator[Mutation]:
    for what, value_of in kinds.items():
        change = _of_entry(container, index, key, value_of)
        yield Mutation(f"{container}[{index}][{key!r}] {what}", words or (key,), change)


def _of_structure() -> Iterator[Mutation]:
    for key in ("state", "param_groups"):
        yield Mutation(f"{key} removed", (key,), lambda mutated, key=key: mutated.pop(key))
    of_groups = {
        "empty": lambda groups: groups.clear(),
        "without its last": lambda groups: groups.pop(),
        "with its last twice": lambda groups: groups.append(groups[-1]),
    }
    for what, change in of_groups.items():
        yield Mutation(f"param_groups {what}", ("param_groups",), lambda sd, change=change: change(sd["param_groups"]))
    sizes = {"with one less": lambda ids: ids[:-1], "with one more": lambda ids: [*ids, 99]}
    yield from _in("param_groups", 0, "params", sizes, "param_groups")


def _of_groups(good: StateDict) -> Iterator[Mutation]:
    last = len(good["param_groups"]) - 1
    group = good["param_groups"][last]
    for key in ("mechanic_format", "mechanic_base", "mechanic_row", "mechanic_tuner", "mechanic_unit"):
        yield from _in("param_groups", last, key, {"removed": lambda _: None})
    yield from _in("param_groups", last, "mechanic_format", {"newer": lambda _: 99})
    yield from _in("param_groups", last, "mechanic_base", {"another": lambda _: "Stranger"})
    yield from _in("param_groups", last, "tuner", {"another": lambda _: "c"})
    own_iterates = None if "mechanic_own_iterates" in group else 1
    yield from _in("param_groups", last, "mechanic_own_iterates", {"turned": lambda _: own_iterates})
    tuners = {
        "with other betas": lambda tuner: torch.cat([tuner[:1] / 2, tuner[1:]]),
        "with a beta less": lambda tuner: tuner[:, :-1],
        "without its last row": lambda tuner: tuner[:-1],
        "with a row more": lambda tuner: torch.cat([tuner, tuner[-1:]]),
    }
    yield from _in("param_groups", last, "mechanic_tuner", tuners)
    if "mechanic_frozen" in group and last == 0:  # the tuner has learned, and there is no Delta
        yield from _in("param_groups", last, "mechanic_frozen", {"removed": lambda _: None}, "mechanic_delta")


def _of_deltas(good: StateDict) -> Iterator[Mutation]:
    first, entry = next(iter(good["state"].items()))
    kinds = {
        "removed": lambda _: None,
        "with a row more": lambda tensor: torch.cat([tensor, tensor[-1:]]),
        "transposed": lambda tensor: tensor.T.contiguous(),
        "a number": lambda _: 0.5,
        "in codes": lambda tensor: tensor.to(torch.int8),
    }
    harmless = {
        "in another order in memory": lambda tensor: tensor.T.contiguous().T,
        "that requires gradients": lambda tensor: tensor.requires_grad_(),
    }
    for key in ("mechanic_delta", "mechanic_residual"):
        if key in entry:
            yield from _in("state", first, key, kinds)
            for mutation in _in("state", first, key, harmless):
                yield dataclasses.replace(mutation, may_load=True)


def _of_lost_state(good: StateDict) -> Iterator[Mutation]:
    """A tuner that has learned, and whose parameters have no Delta."""
    group = good["param_groups"][-1]
    if "mechanic_frozen" in group:
        return

    def lose(mutated: StateDict) -> None:
        groups = [each for each in mutated["param_groups"] if each["mechanic_row"] == group["mechanic_row"]]
        for key in [key for each in groups for key in each["params"]]:
            del mutated["state"][key]

    def lose_deltas(mutated: StateDict) -> None:
        for entry in mutated["state"].values():
            del entry["mechanic_delta"]

    yield Mutation("no state of the last tuner", ("state",), lose)
    yield Mutation("no state", ("state",), lambda mutated: mutated["state"].clear())
    yield Mutation("no Delta at all", ("mechanic_delta",), lose_deltas)


def _of_pairs(good: StateDict) -> Iterator[Mutation]:
    """Two groups: swapped, or that share a tuner here only, or in the checkpoint only."""
    if len(good["param_groups"]) < 2:
        return
    first, last = good["param_groups"]
    if "mechanic_frozen" not in first or "tuner" in first:  # else nothing tells
        words = ("tuner", "mechanic_delta")
        yield Mutation("groups swapped", words, lambda mutated: mutated["param_groups"].reverse())
    another = first["mechanic_row"] + (first["mechanic_row"] == last["mechanic_row"])
    yield from _in("param_groups", 1, "mechanic_row", {"another": lambda _: another}, "tuner")
