"""Sharded parameters, on eight devices that the host is made to show: the checks are in sharded.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_shards_give_the_result_of_one_device_with_one_all_reduce():
    """In a process of its own, since the number of devices is settled when JAX starts."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.jax.sharded"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"},
        timeout=480,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
