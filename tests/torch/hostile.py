"""Optimizers to load broken checkpoints into, and what is wrong with how they take one."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytorch_optimizer
import schedulefree
import torch
from torch import nn, optim

from mechanic.torch import Mechanic

SAVED_AFTER, CONTINUED = 4, 3


def make_model(seed, *, bias=True, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3, bias=bias), nn.Tanh(), nn.Linear(3, 2, bias=bias)).to(dtype)


def one_step(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 4, generator=generator).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    (model(inputs) - inputs[:, :2].sin()).square().mean().backward()
    optimizer.step()


@dataclasses.dataclass(frozen=True, eq=False)
class Situation:
    name: str
    base: Callable[..., optim.Optimizer]
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of Mechanic
    model_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    frozen: bool = False

    def build(self, seed, steps):
        model = make_model(seed, **self.model_options)
        optimizer = Mechanic(self.base(self.groups(model), lr=0.1), **self.options)
        optimizer.train()
        for step in range(steps):
            one_step(model, optimizer, step)
        if self.options.get("skip_nonfinite") and steps:
            next(model.parameters()).grad.fill_(float("nan"))
            optimizer.step()
        if self.frozen and steps:
            optimizer.freeze()
            one_step(model, optimizer, steps)
        return model, optimizer

    def loading(self, trained):
        """A run that a checkpoint is to be loaded into: just built, or under way."""
        return self.build(seed=1, steps=2 if trained else 0)

    @functools.cached_property
    def saved(self):
        """The good checkpoint: the model's and the optimizer's."""
        model, optimizer = self.build(seed=0, steps=SAVED_AFTER)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    @functools.cache  # noqa: B019
    def continued(self, trained):
        """Where the good checkpoint leads."""
        model, optimizer = self.loading(trained)
        optimizer.load_state_dict(fresh(self.saved[1]))
        return self.go_on(model, optimizer)

    def go_on(self, model, optimizer):
        model.load_state_dict(self.saved[0])
        for step in range(SAVED_AFTER + 1, SAVED_AFTER + 1 + CONTINUED):
            one_step(model, optimizer, step)
        return tensors_of(model, optimizer)

    @functools.cache  # noqa: B019
    def undisturbed(self, trained):
        """One more step without any load."""
        model, optimizer = self.loading(trained)
        one_step(model, optimizer, 50)
        return copy.deepcopy(everything(model, optimizer))


def layers(*names):
    def groups(model):
        named = [{"tuner": name} if name else {} for name in names]
        return [
            {"params": list(layer.parameters()), **name}
            for layer, name in zip((model[0], model[2]), named, strict=True)
        ]

    return groups


def with_options(cls, **options):
    return functools.partial(cls, **options)


BASES = [
    Situation("SGD momentum", with_options(optim.SGD, momentum=0.9)),
    Situation("Adam", with_options(optim.Adam, amsgrad=True)),
    Situation("AdamW", optim.AdamW),
    Situation("NAdam", optim.NAdam),
    Situation("RMSprop", with_options(optim.RMSprop, momentum=0.9, centered=True)),
    Situation("Adagrad", optim.Adagrad),
    *(
        Situation(name, getattr(optim, name), model_options={"bias": False})
        for name in ("Muon",)
        if hasattr(optim, name)
    ),
    Situation("Adafactor", optim.Adafactor),
    Situation("Lion", pytorch_optimizer.Lion),
]
SITUATIONS = [
    Situation("AdamW", optim.AdamW),
    Situation("Adagrad", optim.Adagrad),  # which has state before its first step
    Situation("two groups, one tuner", optim.AdamW, layers(None, None)),
    Situation("two tuners", optim.AdamW, layers("a", "b")),
    Situation("a tuner per group", with_options(optim.SGD, momentum=0.9), layers(None, None), {"per_group": True}),
    Situation("bfloat16", optim.AdamW, model_options={"dtype": torch.bfloat16}),
    Situation("int8", optim.AdamW, options={"delta": "int8"}),
    Situation("skipping", optim.AdamW, options={"skip_nonfinite": True}),
    Situation("frozen", optim.AdamW, frozen=True),
    Situation("frozen bfloat16", optim.AdamW, model_options={"dtype": torch.bfloat16}, frozen=True),
    Situation("frozen, two tuners", optim.AdamW, layers("a", "b"), frozen=True),
    Situation("own iterates", schedulefree.AdamWScheduleFree, options={"own_iterates": True}),
]
BY_NAME = {situation.name: situation for situation in SITUATIONS}


def same(a, b):
    """Bit for bit, with the types of Python's values."""
    if type(a) is not type(b):
        return False
    if torch.is_tensor(a):
        if a.dtype != b.dtype or (a.shape != b.shape and not a.numel() == b.numel() == 1):  # [] or [1]
            return False
        if a.layout != b.layout or a.device != b.device:
            return False
        return a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8)) if a.numel() else True
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


def fresh(value):
    """A copy of a checkpoint, or of a part of one; some times faster than deepcopy."""
    if torch.is_tensor(value):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: fresh(entry) for key, entry in value.items()}
    return [fresh(entry) for entry in value] if isinstance(value, list) else value


def tensors_of(model, optimizer):
    """All that training moves: parameters, state, tuners."""
    return copy.deepcopy(
        {
            "parameters": [p.detach() for p in model.parameters()],
            "state": [
                {key: value for key, value in optimizer.state.get(p, {}).items() if torch.is_tensor(value)}
                for p in model.parameters()
            ],
            "tuners": [group["mechanic_tuner"] for group in optimizer.param_groups],
        }
    )


def everything(model, optimizer):
    """And what does not move: every value of the state and the groups, and which parameters they belong to."""
    index = {p: i for i, p in enumerate(model.parameters())}
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "state": {index.get(p, p): entries for p, entries in optimizer.state.items()},
        "param_groups": [
            {**group, "params": [index.get(p) for p in group["params"]]} for group in optimizer.param_groups
        ],
        "defaults": optimizer.defaults,
    }


def what_changed(before, after):
    return ", ".join(part for part in before if not same(before[part], after[part]))


@dataclasses.dataclass(frozen=True)
class Broken:
    what: str
    make: Callable[[], Any]
    words: tuple[str, ...]  # a refusal has to contain one of them
    may_load: bool = False  # if it then continues as the good one


def faults_of(situation, checkpoints, *, trained):
    """What is wrong with how broken checkpoints are taken, by what they are; None where nothing is.

    Each has to be refused with a ValueError that names what is broken and leaves everything as it was. Those that may
    load may continue as the good checkpoint does instead. All that are refused then meet one optimizer, whose next step
    has to be that of one which never met them.
    """
    where = f", into a {'running' if trained else 'new'} optimizer"
    faults, refused, victim = {}, [], None
    for broken in checkpoints:
        if victim is None:
            victim = situation.loading(trained)
            before = copy.deepcopy(everything(*victim))
        fault, is_intact = _fault_of_load(situation, victim, before, broken, trained=trained)
        faults[broken.what + where] = fault
        if is_intact:
            refused.append(broken)
        else:
            victim = None
    if _fault_of_next_step(situation, refused, trained=trained):
        for broken in refused:
            faults[f"{broken.what}{where}, the next step"] = _fault_of_next_step(situation, [broken], trained=trained)
    return faults


def _fault_of_load(situation, victim, before, broken, *, trained):
    """The fault, and whether the victim is still what it was."""
    try:
        victim[1].load_state_dict(broken.make())
    except Exception as error:
        if changed := what_changed(before, everything(*victim)):
            return f"refused, but changed {changed}: {_said(error)}", False
        if not isinstance(error, ValueError):
            return f"raises {_said(error)}", True
        if not any(word in str(error) for word in broken.words):
            return f"refused without naming {' or '.join(broken.words)}: {_said(error)}", True
        return None, True
    if not broken.may_load:
        return "loads", False
    try:
        end = situation.go_on(*victim)
    except Exception as error:
        return f"loads, then fails: {_said(error)}", False
    changed = what_changed(situation.continued(trained), end)
    return f"loads, and continues wrongly: {changed}" if changed else None, False


def _fault_of_next_step(situation, refused, *, trained):
    victim = situation.loading(trained)
    for broken in refused:
        with contextlib.suppress(Exception):
            victim[1].load_state_dict(broken.make())
    try:
        one_step(*victim, 50)
    except Exception as error:
        return f"fails: {_said(error)}"
    changed = what_changed(situation.undisturbed(trained), everything(*victim))
    return f"differs: {changed}" if changed else None


def _said(error):
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
