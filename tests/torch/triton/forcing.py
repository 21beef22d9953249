"""Which kernels make a step, for the tests that run in processes of their own."""

import os
from contextlib import contextmanager

from mechanic.torch.gpu import launches


@contextmanager
def using(kernels):
    os.environ["MECHANIC_KERNELS"] = kernels
    try:
        yield
    finally:
        del os.environ["MECHANIC_KERNELS"]


@contextmanager
def counted():
    """The names of the kernels that are started meanwhile."""
    started, launch = [], launches.launch

    def count(name, programs, *arguments, **constants):
        if programs:
            started.append(name)
        launch(name, programs, *arguments, **constants)

    launches.launch = count
    try:
        yield started
    finally:
        launches.launch = launch
