import os
import random
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

try:
    import torch
except ModuleNotFoundError:  # the tests of mechanic.jax run without it
    pass
else:
    # Small tensors: a second thread costs more than it brings, above all beside other test workers.
    torch.set_num_threads(1)

# Small programs: in the tests of mechanic.jax nearly all the time goes into compiling them, and this makes it a third.
flags = ["--xla_backend_optimization_level=0"]
if find_spec("jaxlib") and version("jaxlib").startswith(("0.8.", "0.9.", "0.10.")):  # JAX 0.12 ends at a flag it lost
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(flags))

# The random part of tests/campaign. Set before the workers of pytest-xdist start, so that they share it.
os.environ.setdefault("MECHANIC_CAMPAIGN_SEED", str(random.SystemRandom().randrange(2**32)))


FAST = set(Path(__file__).with_name("fast.txt").read_text().splitlines())
"""Tests for ``make quick``: up to seven quick ones of every file, so that every promise is tried once."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid in FAST:
            item.add_marker(pytest.mark.fast)


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.getreports("passed")
    counts = [count for report in reports for key, count in report.user_properties if key == "campaign_operations"]
    if counts:
        seed = os.environ["MECHANIC_CAMPAIGN_SEED"]
        terminalreporter.write_line(f"campaign: {sum(counts)} operations; MECHANIC_CAMPAIGN_SEED={seed} repeats them")
