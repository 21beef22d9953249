"""What cannot be wrapped is refused with a message that says what to do."""

import re

import prodigyopt
import pytest
import pytorch_optimizer
import torch
from torch import nn, optim

from mechanic.torch import Mechanic, MechanicAdamW, mechanic_class


def params():
    return [nn.Parameter(torch.ones(3, 3))]


def sgd(**options):
    return optim.SGD(params(), **{"lr": 1.0, **options})


def twice(base):
    Mechanic(base)
    Mechanic(base)


UNSUITABLE = {
    "LBFGS": (lambda: optim.LBFGS(params()), "several gradients"),
    "SAM": (lambda: pytorch_optimizer.SAM(params(), optim.SGD, lr=1.0), "several gradients"),
    "SparseAdam": (lambda: optim.SparseAdam(params()), "use Adam and sparse=False"),
    "Prodigy": (lambda: prodigyopt.Prodigy(params()), "already learns the size"),
    "DAdaptAdam": (lambda: pytorch_optimizer.DAdaptAdam(params()), "already learns the size"),
    "Mechanic": (lambda: Mechanic(sgd()), "already learns the size"),
}
REFUSED = {
    **{
        name: (lambda make=make: Mechanic(make()), TypeError, f"cannot wrap {name}: it .*{reason}")
        for name, (make, reason) in UNSUITABLE.items()
    },
    "a class that is a Mechanic": (
        lambda: mechanic_class(MechanicAdamW),
        TypeError,
        "MechanicAdamW is a Mechanic already",
    ),
    "a class instead of an instance": (
        lambda: Mechanic(optim.SGD),
        TypeError,
        r"got the class SGD; write Mechanic\(SGD\(params, lr=1\.0\)\)",
    ),
    "an instance instead of a class": (
        lambda: mechanic_class(sgd()),
        TypeError,
        r"mechanic_class takes an optimizer class.*Mechanic\(\.\.\.\)",
    ),
    "parameters": (
        lambda: Mechanic(nn.Linear(1, 1).parameters()),
        TypeError,
        r"got generator; write Mechanic\(torch\.optim\.AdamW\(model\.parameters",
    ),
    "a module": (
        lambda: Mechanic(nn.Linear(1, 1)),
        TypeError,
        r"wraps a torch\.optim\.Optimizer instance, got Linear",
    ),
    "a base that is wrapped already": (lambda: twice(sgd()), ValueError, "already wrapped, or was loaded"),
    "a differentiable base": (lambda: Mechanic(sgd(differentiable=True)), ValueError, "without differentiable=True"),
    "a parameter twice in a group": (lambda: Mechanic(optim.SGD(2 * params(), lr=1.0)), ValueError, "more than once"),
    "no learning rate at all": (
        lambda: Mechanic(sgd(lr=0.0)),
        ValueError,
        r"every learning rate is 0.*any positive lr",
    ),
    **{
        f"a learning rate of {lr}": (
            lambda lr=lr: Mechanic(sgd(lr=lr)),
            ValueError,
            "a learning rate must be a finite number",
        )
        for lr in (float("nan"), float("inf"))
    },
    **{
        f"a peak of {lr}": (
            lambda lr=lr: Mechanic(sgd(), peak_lr=lr),
            ValueError,
            "peak_lr must be a positive learning rate",
        )
        for lr in (0.0, -1.0, float("nan"), float("inf"))
    },
}


def said_by(make, error):
    try:
        make()
    except error as refusal:
        return str(refusal)
    return "nothing"


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_what_cannot_work_is_refused():
    said = {name: said_by(make, error) for name, (make, error, _) in REFUSED.items()}
    assert {name: text for name, text in said.items() if not re.search(REFUSED[name][2], text)} == {}


def test_sparse_gradients():
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = Mechanic(optim.SGD(embedding.parameters(), lr=1.0))
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"dense gradients, got one of layout torch\.sparse_coo"):
        optimizer.step()
