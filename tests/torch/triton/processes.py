"""Processes for tests of Triton: whether it interprets is decided when it is imported, so pytest's own never does."""

import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context

import pytest


def _reason_to_skip():
    if find_spec("triton") is None:
        return "Triton is not installed"
    major, minor = map(int, version("triton").split(".")[:2])
    return "" if (major, minor) >= (3, 9) else "the tests were written for Triton 3.9"


needs_triton = pytest.mark.skipif(bool(_reason_to_skip()), reason=_reason_to_skip() or "it is there")


def _begin(environment):
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)


@contextmanager
def process(**environment):
    """A process with these variables. It runs functions one after another."""
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (environment,)) as pool:
        yield lambda function, *arguments, **options: pool.submit(function, *arguments, **options).result()
