"""Several optimizers as one, each with param groups and options of its own."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.layout import Group, StateDict, params_of
from mechanic.torch.private import run_hooks, run_load_state_dict_hooks, step_without_hooks

OPTIMIZER = "optimizer"
"""The entry of a param group that names its optimizer."""


class Together(Optimizer):
    """Several optimizers as one: for schedulers, gradient scalers, checkpoints, and for :class:`Mechanic`.

    Every param group stays with its optimizer and keeps that one's options. ``group["optimizer"]`` names it, by its
    class; a second one of the same class is called ``"AdamW 2"``. ``defaults`` are the options that all have.

    Args:
        optimizers: any optimizers, with different parameters. Step this one from now on, not them.

    Example:
        >>> import torch
        >>> from mechanic.torch import Mechanic, Together
        >>> model = torch.nn.Linear(4, 1)
        >>> parts = torch.optim.SGD([model.weight], lr=1.0), torch.optim.AdamW([model.bias], lr=1.0)
        >>> optimizer = Mechanic(Together(*parts), per_group=True)
        >>> [group["optimizer"] for group in optimizer.param_groups]
        ['SGD', 'AdamW']
        >>> optimizer.scales()
        {'group 0': 0.0, 'group 1': 0.0}
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        _refuse_unsuitable(optimizers)
        kinds = [type(member).__name__ for member in optimizers]
        named: dict[str, Optimizer] = {}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for index, (kind, member) in enumerate(zip(kinds, optimizers, strict=True)):
            count = 1 + kinds[:index].count(kind)
            name = kind if count == 1 else f"{kind} {count}"
            named[name] = member
            state.update(member.state)
            for group in member.param_groups:
                group[OPTIMIZER] = name
        shared = set.intersection(*(set(member.defaults) for member in optimizers))
        # Optimizer.__init__ would make groups of its own; __setstate__ makes only what hooks need.
        self.__setstate__(
            {
                "defaults": {key: value for key, value in optimizers[0].defaults.items() if key in shared},
                "state": state,
                "param_groups": [group for member in optimizers for group in member.param_groups],
                "by_name": named,
            }
        )

    by_name: dict[str, Optimizer]  # as they are; `members` brings them up to date

    @property
    def members(self) -> tuple[Optimizer, ...]:
        """The optimizers, each with its own groups and state as they are now."""
        for member in self.by_name.values():
            shown = self._stand_in_for(member)
            member.param_groups, member.state = shown.param_groups, shown.state
        return tuple(self.by_name.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Let every optimizer step. Returns what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        run_hooks(self.members, after=False)
        self.act("step")
        run_hooks(self.members, after=True)
        return loss

    def act(self, method: str) -> None:
        """Let every optimizer step that has param groups here, without hooks, or call its ``train`` or ``eval``."""
        for member in self.by_name.values():
            shown = self._stand_in_for(member)
            if shown.param_groups:
                act(shown, method)
                if odd := [key for key in shown.state if not isinstance(key, Tensor)]:
                    kind = type(member).__name__
                    raise TypeError(f"{kind} keeps a state of no parameter, {odd[0]!r}, and cannot be one of several")
                self.state.update(shown.state)
                take_over(shown, member)

    def _stand_in_for(self, member: Optimizer) -> Any:
        """A stand-in for one of the optimizers, with its groups and state as they are here, where others write."""
        groups = [g for g, owner in zip(self.param_groups, owners_of(self), strict=True) if owner is member]
        state = defaultdict(dict, {p: self.state[p] for p in params_of(groups) if p in self.state})
        return stand_in(member, groups, lambda _: state)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters to the optimizer that the group names, ``{"params": ..., "optimizer": "AdamW"}``."""
        name = param_group.get(OPTIMIZER)
        if name not in self.by_name:
            raise ValueError(
                f"a new group has to name its optimizer, one of {list(self.by_name)}, and this one names {name!r}: "
                f'add_param_group({{"params": ..., "optimizer": {next(iter(self.by_name))!r}}})'
            )
        member = self.by_name[name]
        shown = stand_in(member, self.param_groups, lambda _: self.state)  # of all, where it looks for duplicates
        shown.add_param_group(param_group)
        take_over(shown, member)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Let every optimizer load its part. If one of them cannot, nothing has changed."""
        run_load_state_dict_hooks(self, state_dict, self._load)

    def _load(self, state_dict: StateDict) -> None:
        saved_groups = state_dict["param_groups"]
        were, are = [group.get(OPTIMIZER) for group in saved_groups], names_by_group(self)
        if were != are:
            raise ValueError(f"the param_groups were of {were} when saved, here they are of {are}")
        shown = {name: self._stand_in_for(member) for name, member in self.by_name.items()}
        for name, each in shown.items():
            groups = [group for group in saved_groups if group[OPTIMIZER] == name]
            keys: set[Any] = set(params_of(groups))
            own = {key: entry for key, entry in state_dict["state"].items() if key in keys}
            each.load_state_dict({"state": own, "param_groups": groups})
        loaded = {name: iter(each.param_groups) for name, each in shown.items()}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for name, each in shown.items():
            state.update(each.state)
            take_over(each, self.by_name[name])
        self.__setstate__({"state": state, "param_groups": [next(loaded[name]) for name in are]})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "by_name": self.by_name}


def stand_in(base: Optimizer, groups: list[Group], state_of: Callable[[Optimizer], Any]) -> Any:
    """An optimizer like this one, with other groups and state, to call its methods without changing it.

    An optimizer inside it (Lookahead's) is replaced as well: it has the same groups, and a state of its own.
    """
    found: Any = object.__new__(type(base))
    vars(found).update(vars(base))
    inner = {name: value for name, value in vars(base).items() if isinstance(value, Optimizer)}
    vars(found).update({name: stand_in(value, groups, state_of) for name, value in inner.items()})
    vars(found).pop("step", None)  # of this instance: what a scheduler has put there is bound to it
    vars(found).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    if not isinstance(getattr(type(base), "param_groups", None), property):
        found.param_groups = groups
    found.state = state_of(base)
    return found


NOT_TAKEN_OVER = ("param_groups", "state", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def take_over(shown: Optimizer, base: Optimizer) -> None:
    """Set what a stand-in has set on itself, but for groups and state."""
    for name, value in vars(shown).items():
        if name in vars(base) and isinstance(vars(base)[name], Optimizer):
            take_over(value, vars(base)[name])
        elif name not in NOT_TAKEN_OVER and vars(base).get(name) is not value:
            vars(base)[name] = value


def act(optimizer: Any, method: str) -> None:
    """Let an optimizer or a stand-in for it step, without hooks, or call its ``train`` or ``eval`` if it has one."""
    if isinstance(optimizer, Together):
        optimizer.act(method)
    elif method == "step":
        step_without_hooks(optimizer)
    elif hasattr(optimizer, method):
        getattr(optimizer, method)()


def members_of(base: Optimizer) -> list[Optimizer]:
    """The optimizers that a base consists of; it alone, if it is an ordinary one."""
    return list(base.by_name.values()) if isinstance(base, Together) else [base]


def owners_of(base: Optimizer) -> list[Optimizer]:
    """The optimizer that steps each param group."""
    by_name = base.by_name if isinstance(base, Together) else {type(base).__name__: base}
    return [by_name[name] for name in names_by_group(base)]


def names_by_group(base: Optimizer) -> list[str]:
    """What the optimizer of each param group is called."""
    if not isinstance(base, Together):
        return [type(base).__name__] * len(base.param_groups)
    names: list[Any] = [group.get(OPTIMIZER) for group in base.param_groups]
    if not base.by_name.keys() >= set(names):
        raise ValueError("a param group does not name its optimizer; add groups with add_param_group")
    return names


def options_of(base: Optimizer) -> set[str]:
    """The names of all options that some group of a base can have."""
    return {key for member in members_of(base) for key in member.defaults}


def _refuse_unsuitable(optimizers: tuple[Any, ...]) -> None:
    for member in optimizers:
        if not isinstance(member, Optimizer):
            raise TypeError(f"Together takes optimizers, one by one, got {type(member).__name__}")
        if isinstance(member, Together) or any("mechanic_format" in group for group in member.param_groups):
            raise TypeError("Together takes bare optimizers, all of them in one: Mechanic(Together(first, second))")
    if not optimizers:
        raise ValueError("Together takes at least one optimizer")
    params = [p for member in optimizers for p in params_of(member.param_groups)]
    if len(params) != len(set(params)):
        raise ValueError("a parameter is in several of the optimizers, and would be stepped several times")
