"""The bases whose step the kernels know: torch's own, and Lion. What they keep, and the numbers of their rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.bases import has_hooks
from mechanic.torch.gpu import columns
from mechanic.torch.layout import Group
from mechanic.torch.private import foreach_add_


class Rule(NamedTuple):
    """A base's rule, as one param group uses it."""

    number: int  # of mechanic.torch.gpu.columns
    state: tuple[str, ...]  # what it keeps of a parameter: the entries that the kernels read and write
    numbers: Callable[
        [Group, float, float], tuple[float, ...]
    ]  # of the group, the step, and NAdam's mu_product before it
    is_decoupled: bool = False  # its weight decay acts on the parameters, not on the gradient
    counts_steps: bool = False


def rules_of(base: Optimizer) -> list[Rule] | None:
    """The rule of each param group; None if the kernels do not know one of them, or somebody watches the base."""
    if has_hooks(base):
        return None
    known = _RULES.get((type(base).__module__.partition(".")[0], type(base).__name__))
    if known is None:
        return None
    rules = [known(group) for group in base.param_groups]
    return None if any(rule is None for rule in rules) else rules  # type: ignore[return-value]


def _number(group: Group, *names: str) -> bool:
    """Whether these options are plain numbers."""
    return not any(isinstance(group[name], Tensor) for name in names)


def _adam(group: Group) -> Rule | None:
    if group["amsgrad"] or not _number(group, "weight_decay") or any(isinstance(b, Tensor) for b in group["betas"]):
        return None
    is_decoupled = bool(group.get("decoupled_weight_decay", False))
    return Rule(columns.ADAM, ("exp_avg", "exp_avg_sq"), _adam_numbers, is_decoupled, counts_steps=True)


def _adamw(group: Group) -> Rule | None:
    return _adam({**group, "decoupled_weight_decay": True})


def _adam_numbers(group: Group, step: float, _: float) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    if math.isnan(step):  # it is counted on the device, which makes the corrections from logarithms
        corrections = _log(beta1), _log(beta2)
    else:
        corrections = 1 / (1 - beta1**step), (1 - beta2**step) ** -0.5
    return beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], *corrections


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _nadam(group: Group) -> Rule | None:
    if group["capturable"] or not _number(group, "weight_decay"):
        return None
    names = "exp_avg", "exp_avg_sq"
    return Rule(columns.NADAM, names, _nadam_numbers, bool(group["decoupled_weight_decay"]), counts_steps=True)


def nadam_mu(group: Group, step: float) -> float:
    return float(group["betas"][0] * (1 - 0.5 * 0.96 ** (step * group["momentum_decay"])))


def _nadam_numbers(group: Group, step: float, mu_product: float) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    mu, mu_next = nadam_mu(group, step), nadam_mu(group, step + 1)
    mu_product *= mu
    of_grad, of_average = (1 - mu) / (1 - mu_product), mu_next / (1 - mu_product * mu_next)
    return beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], of_grad, (1 - beta2**step) ** -0.5, of_average


def _sgd(group: Group) -> Rule | None:
    if not _number(group, "weight_decay"):
        return None
    if not group["momentum"]:
        return Rule(columns.SGD, (), lambda *_: ())
    return Rule(columns.MOMENTUM, ("momentum_buffer",), _momentum_numbers)


def _momentum_numbers(group: Group, *_: float) -> tuple[float, ...]:
    momentum = group["momentum"]
    return momentum, 1 - group["dampening"], *((1.0, momentum) if group["nesterov"] else (0.0, 1.0))


def _lion(group: Group) -> Rule | None:
    """Of pytorch_optimizer, without the options that change the rule."""
    if any(group.get(name) for name in ("use_gc", "adanorm", "cautious", "fixed_decay")):
        return None
    return Rule(columns.LION, ("exp_avg",), _lion_numbers, is_decoupled=bool(group.get("weight_decouple", True)))


def _lion_numbers(group: Group, *_: float) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    return beta1, 1 - beta1, beta2, 1 - beta2


def _rmsprop(group: Group) -> Rule | None:
    if group["centered"] or group["capturable"] or not _number(group, "weight_decay"):
        return None
    if group["momentum"] > 0:
        return Rule(columns.RMSPROP_MOMENTUM, ("square_avg", "momentum_buffer"), _rmsprop_numbers, counts_steps=True)
    return Rule(columns.RMSPROP, ("square_avg",), _rmsprop_numbers, counts_steps=True)


def _rmsprop_numbers(group: Group, *_: float) -> tuple[float, ...]:
    return group["alpha"], 1 - group["alpha"], group["eps"], group["momentum"]


def _adagrad(group: Group) -> Rule | None:
    if not _number(group, "weight_decay") or group["lr_decay"]:
        return None
    return Rule(columns.ADAGRAD, ("sum",), lambda group, *_: (group["eps"],), counts_steps=True)


_RULES: dict[tuple[str, str], Callable[[Group], Rule | None]] = {
    ("torch", "SGD"): _sgd,
    ("torch", "Adam"): _adam,
    ("torch", "AdamW"): _adamw,
    ("torch", "NAdam"): _nadam,
    ("torch", "RMSprop"): _rmsprop,
    ("torch", "Adagrad"): _adagrad,
    ("pytorch_optimizer", "Lion"): _lion,
}


def numbers_of(
    rule: Rule, group: Group, share: float, sign: float, weight: float, step: float, mu_product: float
) -> tuple[float, ...]:
    """A row of the table. ``share`` is the learning rate as a fraction of its peak."""
    decay = float(group.get("weight_decay", 0.0))
    own = rule.numbers(group, step, mu_product)
    decays = (decay, 0.0) if rule.is_decoupled else (0.0, decay)
    return sign, weight, share, *decays, *own, *[0.0] * (columns.NUMBERS_ROW - columns.OWN - len(own))


def numbers_around(sign: float, weight: float, decay: float) -> tuple[float, ...]:
    """A row of the table around a base that steps by itself."""
    return sign, weight, 1.0, decay, *[0.0] * (columns.NUMBERS_ROW - columns.L2)


def is_on_device(counter: Tensor) -> bool:
    """Whether reading a step counter would wait for a device."""
    return counter.device.type != "cpu"


def count_steps(rule: Rule, group: Group, states: list[Any]) -> None:
    """What a base's own step leaves behind besides its update: counts of steps, and NAdam's mu_product."""
    if rule.number == columns.LION and isinstance(group.get("step"), int):
        group["step"] += 1
    counters = [state["step"] for state in states] if rule.counts_steps else []
    if rule.number == columns.ADAM:
        counters = [counter for counter in counters if not is_on_device(counter)]  # `tune` counts the others
    if counters:
        foreach_add_(counters, 1)
    if rule.number == columns.NADAM:
        for state in states:
            state["mu_product"] *= nadam_mu(group, state["step"].item())
