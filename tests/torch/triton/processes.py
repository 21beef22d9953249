"""Processes for tests of Triton: whether it interprets is decided when it is imported, so pytest's own never does."""

import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context


def _begin(environment):
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)


@contextmanager
def process(**environment):
    """A process with these variables. It runs functions one after another."""
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (environment,)) as pool:
        yield lambda function, *arguments, **options: pool.submit(function, *arguments, **options).result()
