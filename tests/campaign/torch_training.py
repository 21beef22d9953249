"""One tiny training run: parameters, their optimizer, gradients, and ways to copy all of it."""

import contextlib
import copy
import dataclasses
import inspect
import io
import pickle
from unittest import mock

import pytest
import torch

from mechanic.torch import Mechanic
from mechanic.torch.layout import learned_rate_of
from tests.campaign.torch_bases import Base

GRADIENT_LIMIT = 10.0  # gradients of the loss are clipped, so that a negative learning rate cannot blow the run up
MOST_PARAMETERS = 6


@dataclasses.dataclass
class Training:
    base: Base
    params: list[torch.nn.Parameter]
    optimizer: Mechanic
    options: dict  # of Mechanic
    lr: float  # that the base was built with

    @classmethod
    def start(cls, base, dtype, groups, lr, options, seed):
        """``groups`` are dicts without parameters; each gets one parameter, the last one all that are left."""
        generator = torch.Generator().manual_seed(seed)
        params = [torch.nn.Parameter(random(shape, dtype, generator)) for shape in base.shapes[: len(groups) + 2]]
        shares = [[p] for p in params[: len(groups) - 1]] + [params[len(groups) - 1 :]]
        param_groups = [{"params": share, **group} for group, share in zip(groups, shares, strict=True)]
        optimizer = Mechanic(base.cls(param_groups, lr=lr, **base.options), **options)
        return cls(base, params, optimizer, options, lr)

    @property
    def config(self):
        return self.optimizer.config  # own_iterates turns forgetting off

    @property
    def dtype(self):
        return self.params[0].dtype

    @property
    def is_half_precision(self):
        return self.dtype in (torch.bfloat16, torch.float16)

    @property
    def trains(self):
        """Whether any parameter is to be trained."""
        return any(p.requires_grad for p in self.params)

    def indices(self, group):
        """Which of the parameters are in a param group; -1 is one that should not be there."""
        position = {p: index for index, p in enumerate(self.params)}
        return [position.get(p, -1) for p in group["params"]]

    def fill_gradients(self, seed, noise=0.1, size=1.0):
        """The gradients of a quadratic whose minimum is at 1.5, with noise, for all parameters."""
        generator = torch.Generator().manual_seed(seed)
        for p in self.params:
            slope = p.detach().to(torch.promote_types(p.dtype, torch.float32)) - 1.5
            slope *= (GRADIENT_LIMIT / slope.abs().clamp(min=GRADIENT_LIMIT)).to(slope.dtype)
            grad = size * (slope + noise * random(p.shape, slope.dtype, generator))
            p.grad = grad.to(p.dtype)

    def step_inside_the_backward_pass(self, way):
        """A step with the gradients that are there, each taken when it comes."""
        trained = [p for p in self.params if p.requires_grad]
        if way == "hooks":
            loss = sum((p * p.grad.conj()).real.sum() for p in trained)  # whose gradients are these
            self.optimizer.zero_grad()
            self.optimizer.step_in_backward()
            loss.backward()
            self.optimizer.step()
            self.optimizer.step_in_backward(enabled=False)
        else:
            for p in trained:
                self.optimizer.take_gradient(p)
            self.optimizer.step()

    def new_parameter(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.nn.Parameter(random(self.base.shapes[seed % 2], self.dtype, generator))

    def tuners(self):
        """The names of all groups' tuners; without per_group, None is the one of groups that name none."""
        return {group.get("tuner") for group in self.optimizer.param_groups} - (
            {None} if self.options["per_group"] else set()
        )

    def with_base(self, base):
        """New parameters of the same values, and a new optimizer with the same groups around another base."""
        params = [torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in self.params]
        groups = []
        for group in self.optimizer.param_groups:
            tuner = {"tuner": group["tuner"]} if "tuner" in group else {}
            lr = group.get("mechanic_unit", self.lr)  # that counts as 1: of a script with another, it is rebased
            groups.append({"params": [params[i] for i in self.indices(group)], "lr": lr, **tuner})
        optimizer = Mechanic(base.cls(groups, lr=self.lr, **base.options), **self.options)
        return Training(base, params, optimizer, self.options, self.lr)

    def copied_by_state_dict(self):
        """A new run that loads the checkpoint of this one."""
        twin = self.with_base(self.base)
        twin.optimizer.load_state_dict(saved(self.optimizer.state_dict()))
        return twin

    def copied_by_deepcopy(self):
        params, optimizer = copy.deepcopy((self.params, self.optimizer))
        return dataclasses.replace(self, params=params, optimizer=optimizer)

    def copied_by_pickle(self):
        params, optimizer = pickle.loads(pickle.dumps((self.params, self.optimizer)))
        return dataclasses.replace(self, params=params, optimizer=optimizer)

    def state_dict_of_bare_base(self):
        """What the base would save if Mechanic had never been around it, with every learning rate at 1."""
        state_dict = saved(self.optimizer.state_dict())
        own = {"initial_lr", "max_lr", "min_lr"} | ({"d"} - self.optimizer.defaults.keys())
        for entries in (*state_dict["state"].values(), *state_dict["param_groups"]):
            for key in [key for key in entries if key.startswith("mechanic_") or key in own]:
                del entries[key]
        for group in state_dict["param_groups"]:
            group["lr"] = 1.0
        return state_dict

    def release_and_train(self, seed):
        """Go on with the base alone, at the learned rates; every call of the former Mechanic must say why it fails."""
        optimizer = self.optimizer
        values = [p.detach().clone() for p in self.params]
        rates = [learned_rate_of(g) * float(g["lr"] / g["mechanic_unit"]) for g in optimizer.param_groups]
        plain = optimizer.release()
        assert plain is optimizer.base
        assert all(p.equal(value) for p, value in zip(self.params, values, strict=True))
        assert [float(group["lr"]) for group in plain.param_groups] == pytest.approx(rates, rel=1e-12)
        for entries in (*plain.param_groups, *plain.state.values()):
            assert not [key for key in entries if str(key).startswith("mechanic_")]
        group = {"params": [self.new_parameter(seed)]}
        state_dict = plain.state_dict()
        for call in (
            *(optimizer.step, optimizer.observe, optimizer.freeze, optimizer.release, optimizer.scales),
            *(optimizer.learning_rates, lambda: optimizer.load_state_dict(state_dict)),
            lambda: optimizer.add_param_group(group),
        ):
            with pytest.raises(RuntimeError, match="released"):
                call()
        self.fill_gradients(seed)
        if not self.is_half_precision:  # where the bare base may well fail
            plain.step()

    def wrap_released(self):
        """A new Mechanic around the base, as before its first step."""
        for group in self.optimizer.base.param_groups:
            group["lr"] = 1.0
            for key in ("initial_lr", "max_lr", "min_lr"):
                group.pop(key, None)
        base = self.optimizer.base
        for state in base.state.values():  # float16 has no room for large moments, with or without Mechanic
            for entry in state.values():
                if torch.is_tensor(entry) and entry.dtype == torch.float16:
                    entry.nan_to_num_()
        self.optimizer = Mechanic(base, **self.options)


def random(shape, dtype, generator):
    return torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32), generator=generator).to(dtype)


def saved(state_dict):
    """What comes back from a file."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class InjectedError(Exception):
    """Raised inside the base's step."""


@contextlib.contextmanager
def raising(base, when):
    """Let the step of a base fail before or after the work on its first or last param group.

    torch's optimizers call a function named like themselves once per param group, which is patched here; of others the
    whole step is.
    """
    namespace = inspect.unwrap(type(base).step).__globals__
    names = [cls.__name__.lower() for cls in type(base).__mro__]
    name = next((name for name in names if inspect.isfunction(namespace.get(name))), None)
    work = namespace[name] if name else type(base).step
    trained = sum(any(p.requires_grad for p in group["params"]) for group in base.param_groups)
    calls_left = trained if name and when.endswith("last group") else 1

    def fail(*args, **kwargs):
        nonlocal calls_left
        calls_left -= 1
        if calls_left > 0:
            return work(*args, **kwargs)
        if when.startswith("after"):
            work(*args, **kwargs)
        raise InjectedError

    with mock.patch.dict(namespace, {name: fail}) if name else mock.patch.object(type(base), "step", fail):
        yield
