"""Checkpoints with one thing wrong in each, made systematically from a good one."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.torch.hostile import Broken, fresh

StateDict = dict[str, Any]
Change = Callable[[StateDict], Any]

NAN, INF = float("nan"), float("inf")


@dataclasses.dataclass(frozen=True)
class Mutation:
    what: str
    words: tuple[str, ...]  # a refusal has to contain one of them
    change: Change  # of a copy, in place


def mutations(good: StateDict) -> list[Broken]:
    """All of one checkpoint that concern Mechanic's entries or its structure."""
    changes = [
        *_of_structure(good),
        *_of_states(good),
        *_of_groups(good),
        *_of_mechanics_numbers(good),
        *_of_tuners(good),
        *_of_deltas(good),
        *_of_pairs_of_groups(good),
    ]
    broken = [Broken(m.what, functools.partial(_changed, good, m.change), m.words) for m in changes]
    replaced = [("None", None), ("a list", [1]), ("a string", "hostile"), ("a tensor", torch.ones(2)), ("empty", {})]
    words = ("state_dict", "dict", "param_groups")
    return broken + [Broken(f"the checkpoint is {what}", lambda value=value: value, words) for what, value in replaced]


def _changed(good: StateDict, change: Change) -> StateDict:
    mutated = fresh(good)
    change(mutated)
    return mutated


# What is written into an entry, by what it was.


def _retyped(value: Any) -> Iterator[tuple[str, Any]]:
    """Values of another type; where it can be, of the same meaning, so that accepting them is right as well."""
    if torch.is_tensor(value):
        yield from (("a string", "hostile"), ("None", None), ("a short list", [1.0, 2.0]), ("a dict", {}))
        yield "a list of its numbers", value.tolist()
        yield "a number", value.item() if value.ndim == 0 else 3
    elif isinstance(value, str):
        yield from (("None", None), ("an int", 3), ("a list", [value]), ("a tensor", torch.ones(2)))
    elif isinstance(value, (bool, int, float)):
        yield from (("a string", "hostile"), ("None", None), ("a list", [1.0]), ("a dict", {"a": 1}))
        yield "a tensor of two", torch.tensor([value, value])
    elif isinstance(value, (list, tuple)):
        yield from (("a string", "hostile"), ("None", None), ("an int", 3), ("cut", list(value)[:-1]))


def _reshaped(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    flat = tensor.reshape(-1)
    yield "with one element more", torch.cat([flat, flat[:1]])
    yield "on the meta device", tensor.to("meta")
    yield "sparse", tensor.to_sparse()
    yield "that requires gradients", torch.nn.Parameter(tensor) if tensor.is_floating_point() else tensor
    yield "with a dimension more", tensor.unsqueeze(0)
    yield "empty", flat[:0]
    if tensor.ndim > 1:
        yield "flattened", flat
        yield "transposed", tensor.T.contiguous()
        yield "in another order in memory", tensor.T.contiguous().T
        yield "without its last row", tensor[:-1]


def _not_finite(tensor: torch.Tensor, *numbers: float) -> Iterator[tuple[str, torch.Tensor]]:
    for number in numbers:
        poisoned = tensor.clone()
        poisoned.view(-1)[-1] = number
        yield f"with a {number}", poisoned


def _values(value: Any) -> Iterator[tuple[str, Any]]:
    yield from _retyped(value)
    if torch.is_tensor(value):
        yield from _reshaped(value)
        if value.is_floating_point():
            yield from _not_finite(value, NAN, INF)


# Where it is written to.


def _set(container: str, index: Any, key: str, value: Any) -> Change:
    def change(state_dict: StateDict) -> None:
        state_dict[container][index][key] = fresh(value)  # it may be a view of the good one

    return change


def _remove(container: str, index: Any, key: str) -> Change:
    def change(state_dict: StateDict) -> None:
        del state_dict[container][index][key]

    return change


def _in(container: str, index: Any, key: str, values: Iterator[tuple[str, Any]], *words: str) -> Iterator[Mutation]:
    for what, value in values:
        yield Mutation(f"{container}[{index}][{key!r}] {what}", words or (key,), _set(container, index, key, value))


def _of_states(state_dict: StateDict) -> Iterator[Mutation]:
    seen = set()
    for index, entries in state_dict["state"].items():
        for key, value in entries.items():
            if key in seen:
                continue
            seen.add(key)
            if key.startswith("mechanic_"):
                yield Mutation(f"state[{index}][{key!r}] removed", (key,), _remove("state", index, key))
                yield from _in("state", index, key, _values(value))


def _of_groups(state_dict: StateDict) -> Iterator[Mutation]:
    for index, group in enumerate(state_dict["param_groups"]):
        for key, value in group.items():
            if key.startswith("mechanic_") or key in ("params", "tuner"):
                # Without its Delta a tuner that is not frozen is refused as well, and so on.
                words = (key, "mechanic_delta") if key == "mechanic_frozen" else (key,)
                words += ("own_iterates",) if key == "mechanic_own_iterates" else ()
                what = f"param_groups[{index}][{key!r}] removed"
                yield Mutation(what, words, _remove("param_groups", index, key))
                yield from _in("param_groups", index, key, _values(value), *words)


def _of_mechanics_numbers(state_dict: StateDict) -> Iterator[Mutation]:
    wrong = {
        "mechanic_format": (0, -1, 1.5, 99, NAN, INF),
        "mechanic_unit": (0, 0.0, -1.0, NAN, INF, True),
        "mechanic_row": (-1, 1.5, 7, NAN),
        "mechanic_frozen": (0.0, -1.0, NAN, INF),
        "mechanic_skipped": (-1, 1.5, NAN, INF),
        "mechanic_own_iterates": (0, 2, NAN),
        "mechanic_base": ("", "Stranger"),
        "mechanic_lr": (NAN, INF),
    }
    for index, group in enumerate(state_dict["param_groups"]):
        for key, numbers in wrong.items():
            if key in group:
                values = ((f"{number!r}", number) for number in numbers)
                yield from _in("param_groups", index, key, values, key, key.removeprefix("mechanic_"))


def _of_tuners(state_dict: StateDict) -> Iterator[Mutation]:
    for index, group in enumerate(state_dict["param_groups"]):
        tuner = group["mechanic_tuner"]
        rows, n = tuner.shape
        tall = torch.cat([tuner, tuner[1:].repeat(2, 1)])
        values = [(f"with {count} rows", tall[:count]) for count in (1, 7, 9, rows - 1, rows + 1, 20) if count != rows]
        values += [("with n less", tuner[:, :-1]), ("with n more", torch.cat([tuner, tuner[:, -1:]], 1))]
        values += [("in int64", tuner.long()), ("in complex128", tuner.to(torch.complex128))]
        for row in range(rows):
            for number in (NAN, -INF if row % 2 else INF):
                poisoned = tuner.clone()
                poisoned[row, n // 2] = number
                values.append((f"with {number} in row {row}", poisoned))
        negative = tuner.clone()
        negative[1:] *= -1
        values.append(("with its sign turned", negative))
        yield from _in("param_groups", index, "mechanic_tuner", iter(values), "mechanic_tuner", "betas")


def _of_deltas(state_dict: StateDict) -> Iterator[Mutation]:
    for index in list(state_dict["state"])[:2]:  # a matrix and a vector
        delta = state_dict["state"][index].get("mechanic_delta")
        if delta is not None:
            dtypes = (torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64)
            values = ((f"in {dtype}", delta.to(dtype)) for dtype in dtypes)
            yield from _in("state", index, "mechanic_delta", values)


def _of_pairs_of_groups(state_dict: StateDict) -> Iterator[Mutation]:
    """Two groups: swapped, or at odds about the tuner they share."""
    groups = state_dict["param_groups"]
    if len(groups) < 2:
        return

    def swap(mutated: StateDict) -> None:
        mutated["param_groups"].reverse()

    def swap_tuners(mutated: StateDict) -> None:
        for key in [key for key in mutated["param_groups"][0] if key.startswith("mechanic_") or key == "tuner"]:
            first, second = (group[key] for group in mutated["param_groups"])
            mutated["param_groups"][0][key], mutated["param_groups"][1][key] = second, first

    words = ("param_groups", "tuner", "mechanic_delta", "shape", *(str(group.get("tuner")) for group in groups))
    yield Mutation("groups swapped", words, swap)
    if "tuner" in groups[0]:
        yield Mutation("tuners of the groups swapped", words, swap_tuners)
    if groups[0]["mechanic_row"] != groups[1]["mechanic_row"]:
        return
    doubled = groups[1]["mechanic_tuner"].clone()
    doubled[1:] *= 2
    at_odds = {"mechanic_tuner": doubled, "mechanic_unit": 2 * groups[1]["mechanic_unit"]}
    for key, value in at_odds.items():
        change = _set("param_groups", 1, key, value)
        yield Mutation(f"groups that share a tuner at odds about {key}", (key,), change)


def _of_structure(state_dict: StateDict) -> Iterator[Mutation]:
    for key in ("state", "param_groups"):
        yield Mutation(f"{key} removed", (key,), lambda mutated, key=key: mutated.pop(key))
        for what, value in (("None", None), ("a string", "hostile"), ("a number", 3), ("a list of numbers", [1, 2])):
            yield Mutation(
                f"{key} is {what}", (key,), lambda mutated, key=key, value=value: mutated.update({key: value})
            )

    def change_groups(what: str, change: Callable[[list], Any]) -> Mutation:
        return Mutation(what, ("param_groups", "parameter group"), lambda mutated: change(mutated["param_groups"]))

    yield change_groups("param_groups empty", lambda groups: groups.clear())
    yield change_groups("param_groups lacks its last", lambda groups: groups.pop())
    yield change_groups("param_groups has its last twice", lambda groups: groups.append(groups[-1]))
    yield change_groups("param_groups has None in it", lambda groups: groups.__setitem__(0, None))
    yield change_groups("param_groups has an empty dict in it", lambda groups: groups.__setitem__(0, {}))

    def change_params(what: str, params: Callable[[list], list]) -> Mutation:
        def change(mutated: StateDict) -> None:
            group = mutated["param_groups"][0]
            group["params"] = params(group["params"])

        return Mutation(f"params of group 0 {what}", ("params", "parameter", "shape"), change)

    frozen = "mechanic_frozen" in state_dict["param_groups"][0]  # then there is no Delta that could not fit
    if not frozen:
        yield change_params("reversed", lambda ids: ids[::-1])
    yield change_params("with one less", lambda ids: ids[:-1])
    yield change_params("with one more", lambda ids: [*ids, 99])
    yield change_params("with one twice", lambda ids: [*ids[:-1], ids[0]])
    yield change_params("with an unknown one", lambda ids: [99, *ids[1:]])
    yield change_params("with one as a string", lambda ids: [str(ids[0]), *ids[1:]])
    yield change_params("with a list in it", lambda ids: [[ids[0]], *ids[1:]])

    first = next(iter(state_dict["state"]))

    def change_state(what: str, change: Callable[[dict], Any]) -> Mutation:
        return Mutation(what, ("state", "mechanic_delta"), lambda mutated: change(mutated["state"]))

    if not frozen:
        yield change_state("state empty", lambda state: state.clear())
    for what, value in (("None", None), ("a list", [1.0]), ("a string", "hostile"), ("a tensor", torch.ones(2))):
        yield change_state(f"state[{first}] is {what}", lambda state, value=value: state.update({first: value}))
    yield change_state(f"state[{first}] under a string", lambda state: state.update({str(first): state.pop(first)}))
    yield change_state("state of an unknown parameter", lambda state: state.update({99: fresh(state[first])}))
    if not frozen:
        yield change_state("states of two parameters swapped", lambda state: state.update({0: state[1], 1: state[0]}))
