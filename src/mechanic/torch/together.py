"""Several optimizers as one, each with param groups and options of its own."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.layout import Group, StateDict, params_of
from mechanic.torch.private import run_load_state_dict_hooks, step_hooks, step_without_hooks

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
        named: dict[str, Optimizer] = {}
        for member in optimizers:
            name = kind = type(member).__name__
            count = 1
            while name in named:
                count += 1
                name = f"{kind} {count}"
            named[name] = member
        for name, member in named.items():
            for group in member.param_groups:
                group[OPTIMIZER] = name
        shared = set.intersection(*(set(member.defaults) for member in optimizers))
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for member in optimizers:
            state.update(member.state)
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
        return tuple(self._up_to_date(name) for name in self.by_name)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Let every optimizer step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            for hook in step_hooks(member)[0]:
                hook(member, (member,), {})
        self.step_members()
        for member in self.members:
            for hook in step_hooks(member)[1]:
                hook(member, (member,), {})
        return loss

    def step_members(self) -> None:
        """Let every optimizer step that has param groups here, without the hooks on its step."""
        for name in self.by_name:
            self._call(name, step_without_hooks)

    def switch(self, mode: str) -> None:
        """Call ``train()`` or ``eval()`` of the optimizers that have it (Schedule-Free)."""
        for name, member in self.by_name.items():
            if hasattr(member, mode):
                self._call(name, lambda shown: getattr(shown, mode)())

    def _call(self, name: str, function: Callable[[Optimizer], Any]) -> None:
        """Call a function with one of the optimizers, as a stand-in that has its groups and its state as they are."""
        member = self.by_name[name]
        groups, state = self._part_of(member)
        if not groups:
            return
        shown = stand_in(member, groups, lambda _: state)
        function(shown)
        self._collect(shown)
        take_over(shown, member)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters to the optimizer that the group names, ``{"params": ..., "optimizer": "AdamW"}``."""
        name = param_group.get(OPTIMIZER)
        if name not in self.by_name:
            has = "names none" if name is None else f"names {name!r}"
            raise ValueError(
                f"a new group has to name its optimizer, one of {list(self.by_name)}, and this one {has}: "
                f'add_param_group({{"params": ..., "optimizer": {next(iter(self.by_name))!r}}})'
            )
        member = self._up_to_date(name)
        count = len(member.param_groups)
        member.add_param_group(param_group)
        added, taken = member.param_groups[count:], set(params_of(self.param_groups))
        if any(p in taken for p in params_of(added)):
            raise ValueError("some parameters of the new group are in another group already")
        self.param_groups += added
        self._collect(member)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Let every optimizer load its part. If one of them cannot, nothing has changed."""
        run_load_state_dict_hooks(self, state_dict, self._load)

    def _load(self, state_dict: StateDict) -> None:
        saved_groups, here = state_dict["param_groups"], len(self.param_groups)
        if len(saved_groups) != here:
            raise ValueError(f"the checkpoint has {len(saved_groups)} param_groups, this optimizer has {here}")
        for index, (saved, group) in enumerate(zip(saved_groups, self.param_groups, strict=True)):
            if saved.get(OPTIMIZER) != group[OPTIMIZER]:
                was, now = saved.get(OPTIMIZER), group[OPTIMIZER]
                raise ValueError(f"param_groups[{index}]['optimizer'] was {was!r} when saved, here it is {now!r}")
        loaded: dict[int, Group] = {}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for name in self.by_name:
            indices = [index for index, group in enumerate(self.param_groups) if group[OPTIMIZER] == name]
            groups = [saved_groups[index] for index in indices]
            keys: set[Any] = set(params_of(groups))
            own = {key: entry for key, entry in state_dict["state"].items() if key in keys}
            member = self._up_to_date(name)
            member.load_state_dict({"state": own, "param_groups": groups})
            loaded.update(zip(indices, member.param_groups, strict=True))
            state.update(member.state)
        self.__setstate__({"state": state, "param_groups": [loaded[index] for index in sorted(loaded)]})

    def _up_to_date(self, name: str) -> Optimizer:
        """An optimizer with its groups and its state. The truth is here, since others write to it."""
        member = self.by_name[name]
        member.param_groups, member.state = self._part_of(member)
        return member

    def _part_of(self, member: Optimizer) -> tuple[list[Group], defaultdict[Tensor, Any]]:
        """The groups and the state of one of the optimizers."""
        groups = [g for owner, g in zip(owners_of(self), self.param_groups, strict=True) if owner is member]
        return groups, defaultdict(dict, {p: self.state[p] for p in params_of(groups) if p in self.state})

    def _collect(self, member: Optimizer) -> None:
        """Take over the state that an optimizer has made."""
        for key, entry in member.state.items():
            if not isinstance(key, Tensor):
                name = type(member).__name__
                raise TypeError(f"{name} keeps a state of no parameter, {key!r}, and cannot be one of several")
            self.state[key] = entry

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


def members_of(base: Optimizer) -> list[Optimizer]:
    """The optimizers that a base consists of; it alone, if it is an ordinary one."""
    return list(base.by_name.values()) if isinstance(base, Together) else [base]


def owners_of(base: Optimizer) -> list[Optimizer]:
    """The optimizer that steps each param group."""
    if isinstance(base, Together):
        if any(group.get(OPTIMIZER) not in base.by_name for group in base.param_groups):
            raise ValueError("a param group does not name its optimizer; add groups with add_param_group")
        return [base.by_name[group[OPTIMIZER]] for group in base.param_groups]
    return [base] * len(base.param_groups)


def names_by_group(base: Optimizer) -> list[str]:
    """What the optimizer of each param group is called."""
    owners = owners_of(base)  # raises if a group has none
    names = {id(member): name for name, member in base.by_name.items()} if isinstance(base, Together) else {}
    return [names.get(id(owner), type(owner).__name__) for owner in owners]


def switch_of(base: Optimizer, mode: str) -> Callable[[Any], Any] | None:
    """What calls ``train()`` or ``eval()`` of a base, or of a stand-in for it; None if it has none (Schedule-Free)."""
    if isinstance(base, Together):
        has_mode = any(hasattr(member, mode) for member in members_of(base))
        return (lambda shown: shown.switch(mode)) if has_mode else None
    return (lambda shown: getattr(shown, mode)()) if hasattr(base, mode) else None


def options_of(base: Optimizer) -> set[str]:
    """The names of all options that some group of a base can have."""
    return {key for member in members_of(base) for key in member.defaults}


def _refuse_unsuitable(optimizers: tuple[Any, ...]) -> None:
    for member in optimizers:
        if not isinstance(member, Optimizer):
            raise TypeError(f"Together takes optimizers, one by one, got {type(member).__name__}")
        if isinstance(member, Together):
            raise TypeError("Together takes optimizers that are not a Together already; name them all in one")
        if any("mechanic_format" in group for group in member.param_groups):
            raise TypeError("Together goes inside: write Mechanic(Together(first, second))")
    if not optimizers:
        raise ValueError("Together takes at least one optimizer")
    params = [p for member in optimizers for p in params_of(member.param_groups)]
    if len(params) != len(set(params)):
        raise ValueError("a parameter is in several of the optimizers, and would be stepped several times")
