"""The optimizers whose steps are timed, the bare base of each, and the sizes of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import SGD, AdamW

from mechanic.torch import Mechanic

Build = Callable[[Iterable[Tensor]], Any]


def _opaque(base: Any) -> Any:
    """A base that somebody watches is lent copies, whatever is known of it."""
    base.register_step_post_hook(lambda *_: None)
    return base


def _peer(name: str) -> Build:
    def build(params: Iterable[Tensor]) -> Any:
        if name == "mechanic-pytorch AdamW":
            from mechanic_pytorch import mechanize

            return mechanize(AdamW)(params, lr=1.0, fused=True)
        if name == "mechanic-pytorch SGD":
            from mechanic_pytorch import mechanize

            return mechanize(SGD)(params, lr=1.0, momentum=0.9, fused=True)
        if name == "D-Adaptation":
            from dadaptation import DAdaptAdam

            return DAdaptAdam(params, lr=1.0, weight_decay=0.01, decouple=True)
        if name == "Prodigy":
            from prodigyopt import Prodigy

            return Prodigy(params, lr=1.0, weight_decay=0.01)
        from schedulefree import AdamWScheduleFree

        optimizer = AdamWScheduleFree(params, lr=0.0025)
        optimizer.train()
        return optimizer

    return build


@dataclass(frozen=True)
class Contender:
    build: Build
    against: str = ""  # the name of a bare base; empty for those themselves
    limit: float | None = None  # what the ratio should stay below, at 50M
    words: str = ""  # read and written per parameter, by theory, of contender and reference


FUSED: dict[str, Any] = {"lr": 1e-3, "fused": True}
MOMENTUM: dict[str, Any] = {**FUSED, "momentum": 0.9}
CONTENDERS = {
    "AdamW fused": Contender(lambda p: AdamW(p, **FUSED)),
    "AdamW foreach": Contender(lambda p: AdamW(p, lr=1e-3, foreach=True)),
    "SGD momentum": Contender(lambda p: SGD(p, **MOMENTUM)),
    "Mechanic(AdamW)": Contender(lambda p: Mechanic(AdamW(p, **FUSED)), "AdamW fused", 4.5, "17 / 7"),
    "Mechanic(AdamW, weight_decay=0)": Contender(
        lambda p: Mechanic(AdamW(p, weight_decay=0.0, **FUSED)), "AdamW fused", 3.4, "16 / 7"
    ),
    "Mechanic(AdamW), on copies": Contender(
        lambda p: Mechanic(_opaque(AdamW(p, **FUSED))), "AdamW fused", 4.5, "17 / 7"
    ),
    "Mechanic(AdamW foreach)": Contender(lambda p: Mechanic(AdamW(p, lr=1e-3, foreach=True)), "AdamW foreach", 2.0),
    "Mechanic(SGD)": Contender(lambda p: Mechanic(SGD(p, **MOMENTUM)), "SGD momentum", 3.1, "14 / 5"),
    "Mechanic(SGD), on copies": Contender(
        lambda p: Mechanic(_opaque(SGD(p, **MOMENTUM))), "SGD momentum", 4.0, "15 / 5"
    ),
    "mechanic-pytorch AdamW": Contender(_peer("mechanic-pytorch AdamW"), "AdamW fused"),
    "mechanic-pytorch SGD": Contender(_peer("mechanic-pytorch SGD"), "SGD momentum"),
    "D-Adaptation": Contender(_peer("D-Adaptation"), "AdamW foreach"),
    "Prodigy": Contender(_peer("Prodigy"), "AdamW foreach"),
    "Schedule-Free": Contender(_peer("Schedule-Free"), "AdamW foreach"),
}
OURS = [name for name in CONTENDERS if name.startswith("Mechanic(")]
PEERS = [name for name in CONTENDERS if CONTENDERS[name].against and name not in OURS]
MANY = ["Mechanic(AdamW)", "Mechanic(AdamW foreach)", "Mechanic(SGD)", *PEERS]
CELLS: dict[str, tuple[int, int, list[str]]] = {  # tensors, elements of each, contenders
    "50M": (50, 1_000_000, [*OURS, *PEERS]),
    "1M in 200": (200, 5_000, [*OURS, *PEERS]),
    "50M, two threads": (50, 1_000_000, ["Mechanic(AdamW)", "Mechanic(AdamW foreach)", "Mechanic(SGD)", *PEERS]),
    "200M": (50, 4_000_000, ["Mechanic(AdamW)"]),
    **{f"2M in {n}": (n, 2_000_000 // n, MANY) for n in (1, 10, 100, 1_000, 10_000)},
}
TRAINED = ["AdamW fused", "Mechanic(AdamW)", "mechanic-pytorch AdamW", "D-Adaptation", "Prodigy"]
REMEMBERED = ["AdamW fused", "AdamW foreach", "Mechanic(AdamW)", "Mechanic(AdamW), on copies"]
REMEMBERED += ["mechanic-pytorch AdamW", "D-Adaptation", "Prodigy", "Schedule-Free"]
