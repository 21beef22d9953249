"""The optimizers that are compared: tuned bases, ours around the bases, and the peers as their authors advise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.suite.schedule_free_plus import AdamScheduleFreePlus
from benchmarks.suite.task import Task
from mechanic import TunerConfig
from mechanic.torch import Mechanic, Together, layer_groups, roles

Build = Callable[[nn.Module, Task, float], Optimizer]  # model, task, learning rate


def base_class(name: str, task: Task) -> Callable[..., Optimizer]:
    """A base with all its options but the learning rate."""
    if name == "sgd":
        return functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=task.l2, fused=True)
    if name == "adamw":
        return functools.partial(torch.optim.AdamW, weight_decay=task.weight_decay, fused=True)
    if name == "nadamw":
        return functools.partial(
            torch.optim.NAdam, weight_decay=task.weight_decay, decoupled_weight_decay=True, foreach=True
        )
    if name == "lion":
        from pytorch_optimizer import Lion

        return functools.partial(Lion, betas=(0.9, 0.99), weight_decay=task.weight_decay)
    raise KeyError(name)


BASES = {"sgd": 0.1, "adamw": 1e-3, "nadamw": 1e-3, "lion": 1e-4}  # with the middle of the grid


@dataclass(frozen=True)
class Contender:
    """An optimizer, and against which tuned base it is measured."""

    name: str
    base: str
    build: Build
    lr: float | None = None  # None: to be tuned on a grid
    follows_schedule: bool = True
    averages: bool = False  # evaluated at DoG's average of the iterates
    observes_every: int = 0  # held-out gradients, so often
    lrs: tuple[float, ...] = ()  # where several are to be run all the same
    lines: tuple[str, ...] = ()  # the contenders that it is tuned as, one for each value of a second learning rate
    schedule: Callable[[float], float] | None = None  # of its own, in place of the task's
    point: Mapping[str, float] = field(default_factory=dict)  # what of it was searched for


def _bare(name: str) -> Build:
    return lambda model, task, lr: base_class(name, task)(model.parameters(), lr=lr)


def _ours(name: str, config: Callable[[], TunerConfig] = TunerConfig, **options: Any) -> Build:
    return lambda model, task, lr: Mechanic(_bare(name)(model, task, lr), config=config(), **options)


def _mechanic_pytorch(name: str) -> Build:
    def build(model: nn.Module, task: Task, lr: float) -> Optimizer:
        from mechanic_pytorch import mechanize

        partial: Any = base_class(name, task)
        return mechanize(partial.func)(model.parameters(), lr=lr, **partial.keywords)

    return build


def _d_adaptation(kind: str) -> Build:
    def build(model: nn.Module, task: Task, lr: float) -> Optimizer:
        import dadaptation

        if kind == "sgd":
            return dadaptation.DAdaptSGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=task.l2)
        if kind == "lion":
            return dadaptation.DAdaptLion(model.parameters(), lr=lr, weight_decay=task.weight_decay)
        return dadaptation.DAdaptAdam(model.parameters(), lr=lr, weight_decay=task.weight_decay, decouple=True)

    return build


def _prodigy(model: nn.Module, task: Task, lr: float) -> Optimizer:
    from prodigyopt import Prodigy

    # Under a warm-up its authors advise the safeguard.
    warms_up = task.schedule(0.0) < task.schedule(0.1)
    return Prodigy(model.parameters(), lr=lr, weight_decay=task.weight_decay, safeguard_warmup=warms_up)


def _dog(model: nn.Module, task: Task, lr: float) -> Optimizer:
    from dog import DoG

    return DoG(model.parameters(), lr=lr, weight_decay=task.l2)


def _schedule_free(kind: str) -> Build:
    def build(model: nn.Module, task: Task, lr: float) -> Optimizer:
        import schedulefree

        warm_up = int(0.05 * task.steps)
        if kind == "sgd":
            optimizer = schedulefree.SGDScheduleFree
            return optimizer(model.parameters(), lr=lr, momentum=0.9, weight_decay=task.l2, warmup_steps=warm_up)
        optimizer = schedulefree.AdamWScheduleFree
        return optimizer(model.parameters(), lr=lr, weight_decay=task.weight_decay, warmup_steps=warm_up)

    return build


def _prodigy_plus_schedule_free(model: nn.Module, task: Task, lr: float) -> Optimizer:
    from prodigyplus import ProdigyPlusScheduleFree

    return ProdigyPlusScheduleFree(model.parameters(), lr=lr, weight_decay=task.weight_decay)


def _schedule_free_plus(model: nn.Module, task: Task, lr: float) -> Optimizer:
    return AdamScheduleFreePlus(model.parameters(), lr=lr, warm_up=int(0.05 * task.steps))


TUNED = [Contender(base, base, _bare(base)) for base in BASES]
OURS = [
    *(Contender(f"mechanic {base}", base, _ours(base), lr=1.0) for base in BASES),
    *(Contender(f"mechanic-paper {base}", base, _ours(base, TunerConfig.paper), lr=1.0) for base in BASES),
]
PEERS = [
    *(Contender(f"mechanic-pytorch {base}", base, _mechanic_pytorch(base), lr=1.0) for base in BASES),
    *(Contender(f"d-adaptation {base}", base, _d_adaptation(base), lr=1.0) for base in ("sgd", "adamw", "lion")),
    Contender("prodigy", "adamw", _prodigy, lr=1.0),
    Contender("dog", "sgd", _dog, lr=1.0, follows_schedule=False, averages=True),
    # Their authors' advice where nothing is tuned: the defaults.
    Contender("schedule-free sgd", "sgd", _schedule_free("sgd"), lr=1.0, follows_schedule=False),
    Contender("schedule-free adamw", "adamw", _schedule_free("adamw"), lr=0.0025, follows_schedule=False),
    Contender("prodigy-plus-schedule-free", "adamw", _prodigy_plus_schedule_free, lr=1.0, follows_schedule=False),
    Contender("schedule-free-plus", "adamw", _schedule_free_plus, lr=1.0, follows_schedule=False),
]

# Each of ours' defaults changed alone, to see what it is worth.
CHANGES: dict[str, dict[str, Any]] = {
    "s_init=.001 relative": {"s_init": 0.001},
    "s_init=.1 relative": {"s_init": 0.1},
    "s_init=1e-6 absolute": {"s_init": 1e-6, "relative_start": False},
    "s_init=1e-8 absolute": {"s_init": 1e-8, "relative_start": False},
    "decay=0": {"decay": 0.0},
    "decay=.01": {"decay": 0.01},
    "no guard": {"guard": False},
    "forgetting=0": {"forgetting": 0.0},
    "settle=False": {"settle": False},
    "the paper's betas": {"betas": TunerConfig.paper().betas},
    "one beta .9999": {"betas": (0.9999,)},
}
# Several at once: what the defaults were on the way, so that every choice can be retraced.
_PAPERS_NUMBERS = {"betas": TunerConfig.paper().betas, "decay": TunerConfig.paper().decay}
FORMER_DEFAULTS: dict[str, dict[str, Any]] = {
    "before settling": {**_PAPERS_NUMBERS, "settle": False},
    "before forgetting": {**_PAPERS_NUMBERS, "settle": False, "forgetting": 0.0},
}
VARIANTS = [
    Contender(f"variant {change} / {base}", base, _ours(base, functools.partial(TunerConfig, **options)), lr=1.0)
    for changes, bases in ((CHANGES, ("sgd", "adamw")), (FORMER_DEFAULTS, BASES))
    for change, options in changes.items()
    for base in bases
]

# Studies beyond the paper.


def _own_iterates(kind: str) -> Build:
    def build(model: nn.Module, task: Task, lr: float) -> Optimizer:
        import schedulefree

        classes = {"sgd": schedulefree.SGDScheduleFree, "adamw": schedulefree.AdamWScheduleFree}
        base = classes[kind](model.parameters(), lr=lr, warmup_steps=int(0.05 * task.steps))
        return Mechanic(base, own_iterates=True)

    return build


class _TowardsStart(torch.optim.AdamW):
    """AdamW whose decay pulls to where the parameters started, not to zero."""

    def __init__(self, params: Any, lr: float, pull: float) -> None:
        super().__init__(params, lr=lr, weight_decay=0.0, fused=True)
        self.pull = pull
        self.start = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, start in zip(self.param_groups, self.start, strict=True):
            torch._foreach_lerp_(group["params"], start, min(1.0, group["lr"] * self.pull))
        return super().step(closure)


def _per_layer(name: str) -> Build:
    return lambda model, task, lr: Mechanic(base_class(name, task)(layer_groups(model), lr=lr))


STUDIES = [
    *(
        Contender(f"observing {every} / {base}", base, _ours(base), lr=1.0, observes_every=every)
        for every in (1, 4)
        for base in ("sgd", "adamw")
    ),
    *(
        Contender(
            f"towards start {pull} / adamw",
            "adamw",
            lambda model, task, lr, pull=pull: _TowardsStart(model.parameters(), lr, pull),
        )
        for pull in (0.1, 1.0)
    ),
    *(Contender(f"per layer / {base}", base, _per_layer(base), lr=1.0) for base in ("sgd", "adamw")),
    *(
        Contender(f"mechanic schedule-free / {base}", base, _own_iterates(base), lr=1.0, follows_schedule=False)
        for base in ("sgd", "adamw")
    ),
    *(
        Contender(f"tuned schedule-free / {base}", base, _schedule_free(base), follows_schedule=False)
        for base in ("sgd", "adamw")
    ),
]

# Delta in fewer bytes than the four of float32, which is the default.
STORAGES: dict[str, Any] = {"bfloat16": torch.bfloat16, "int8": "int8"}
STORED = [
    Contender(f"delta {name} / {base}", base, _ours(base, delta=delta), lr=1.0)
    for name, delta in STORAGES.items()
    for base in ("sgd", "adamw")
]

# Muon for matrices and AdamW for the rest. Bare, the pair has two learning rates: on a line, AdamW's is the same.


def _groups_for_muon(model: nn.Module, tuner_of: Callable[[str, str], str]) -> tuple[list[Any], list[Any]]:
    """One param group per tuner, for Muon and for AdamW; ``tuner_of`` gets a parameter's role and its name."""
    groups: dict[tuple[bool, str], list[nn.Parameter]] = {}
    for role, named in roles(model).items():
        for name, p in named.items():
            groups.setdefault((role == "matrix", tuner_of(role, name)), []).append(p)
    both = [[{"params": p, "tuner": key[1]} for key, p in groups.items() if key[0] is side] for side in (True, False)]
    return both[0], both[1]


def _muon_and_adamw(
    model: nn.Module,
    task: Task,
    lr: float,
    adamw_lr: float,
    tuner_of: Callable[[str, str], str] = lambda role, name: "one",
) -> Together:
    matrices, rest = _groups_for_muon(model, tuner_of)
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=task.weight_decay, adjust_lr_fn="match_rms_adamw")
    return Together(muon, torch.optim.AdamW(rest, lr=adamw_lr, weight_decay=task.weight_decay, fused=True))


def _muon_by_default(model: nn.Module, task: Task, lr: float) -> Together:
    matrices, rest = _groups_for_muon(model, MUON_TUNERS["one"])
    return Together(torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(rest, lr=lr))


def muon_point(index: int) -> float:
    return float(f"{MUON_MIDDLE * 10 ** (index / 2):.3g}")


def _line(index: int) -> Contender:
    lr = muon_point(index)
    return Contender(f"muon {lr:g}", "muon", functools.partial(_muon_and_adamw, adamw_lr=lr))


def _layer_of(role: str, name: str) -> str:
    return name.rpartition(".")[0]


MUON_MIDDLE = 3.16e-3  # of both learning rates
MUON_LINES = [_line(index) for index in range(-7, 8)]  # AdamW's, in half decades
MUON_TUNERS: dict[str, Callable[[str, str], str]] = {
    "one": lambda role, name: "one",
    "two": lambda role, name: "matrix" if role == "matrix" else "rest",
    "role": lambda role, name: role,
    "layer": _layer_of,
}
BY_ROLE = "mechanic muon / role"
MUON_PLANE = Contender(
    "muon", "muon", MUON_LINES[0].build, lines=tuple(line.name for line in MUON_LINES)
)  # not run itself
MUON = [
    *(
        Contender(
            f"mechanic muon / {kind}",
            "muon",
            lambda model, task, lr, of=of: Mechanic(_muon_and_adamw(model, task, lr, lr, of)),
            lr=1.0,
        )
        for kind, of in MUON_TUNERS.items()
    ),
    # As torch documents it: the update of a matrix is not made as large as AdamW's.
    Contender("muon, torch's defaults", "muon", _muon_by_default, lr=1e-3),
]

# Not contenders of the tables: what happens to ours when another lr is passed.
FLAT = [
    Contender(f"flat {base}", base, _ours(base), lrs=tuple(10.0**power for power in range(-6, 7, 2)))
    for base in ("sgd", "adamw")
]

_ALL = [*TUNED, *OURS, *PEERS, *VARIANTS, *STUDIES, *STORED, *FLAT, *MUON, *MUON_LINES]
CONTENDERS = {contender.name: contender for contender in _ALL}
