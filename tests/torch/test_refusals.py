"""What cannot be wrapped is refused with a message that says what to do."""

import prodigyopt
import pytest
import pytorch_optimizer
import torch
from torch import optim

from mechanic.torch import Mechanic, mechanic_class


def params():
    return [torch.nn.Parameter(torch.ones(3, 3))]


REFUSED = {
    "LBFGS": (lambda: optim.LBFGS(params()), "several gradients"),
    "SAM": (lambda: pytorch_optimizer.SAM(params(), optim.SGD, lr=1.0), "several gradients"),
    "SparseAdam": (lambda: optim.SparseAdam(params()), "use Adam and sparse=False"),
    "Prodigy": (lambda: prodigyopt.Prodigy(params()), "already learns the size"),
    "D-Adaptation": (lambda: pytorch_optimizer.DAdaptAdam(params()), "already learns the size"),
    "Mechanic": (lambda: Mechanic(optim.SGD(params(), lr=1.0)), "already learns the size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bases_that_cannot_work(name):
    make, reason = REFUSED[name]
    with pytest.raises(TypeError, match=f"cannot wrap {type(make()).__name__}: it .*{reason}"):
        Mechanic(make())


def test_a_class_instead_of_an_instance():
    with pytest.raises(TypeError, match=r"got the class SGD; write Mechanic\(SGD\(params, lr=1\.0\)\)"):
        Mechanic(optim.SGD)


def test_something_else_instead_of_an_optimizer():
    with pytest.raises(TypeError, match=r"wraps a torch\.optim\.Optimizer instance, got Linear"):
        Mechanic(torch.nn.Linear(1, 1))


def test_a_base_that_is_wrapped_already():
    base = optim.SGD(params(), lr=1.0)
    Mechanic(base)
    with pytest.raises(ValueError, match="already wrapped, or was loaded"):
        Mechanic(base)


def test_differentiable():
    with pytest.raises(ValueError, match="without differentiable=True"):
        Mechanic(optim.SGD(params(), lr=1.0, differentiable=True))


def test_every_learning_rate_zero():
    with pytest.raises(ValueError, match=r"every learning rate is 0.*any positive lr"):
        Mechanic(optim.SGD(params(), lr=0.0))


@pytest.mark.parametrize("peak_lr", [0.0, -1.0, float("nan"), float("inf")])
def test_a_peak_lr_that_is_no_learning_rate(peak_lr):
    with pytest.raises(ValueError, match="peak_lr must be a positive learning rate"):
        Mechanic(optim.SGD(params(), lr=1.0), peak_lr=peak_lr)


def test_sparse_gradients():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = Mechanic(optim.SGD(embedding.parameters(), lr=1.0))
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"dense gradients, got one of layout torch\.sparse_coo"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_twice_in_a_group():
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="more than once"):
        Mechanic(optim.SGD([p, p], lr=1.0))


def test_an_instance_where_a_class_is_wanted():
    with pytest.raises(TypeError, match=r"mechanic_class takes an optimizer class.*Mechanic\(\.\.\.\)"):
        mechanic_class(optim.SGD(params(), lr=1.0))
