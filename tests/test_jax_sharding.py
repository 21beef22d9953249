"""Sharded parameters: the result of one device, and one all-reduce. On eight devices that the host is made to show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("jax_sharded.py")


@pytest.mark.parametrize(
    "checks",
    [
        ("one_all_reduce", "result_of_one_device", "result_on_explicit_axes"),
        ("training_of_one_device", "data_parallel_in_shard_map"),
        ("shard_map", "shard_map_without_tracking", "ensembles_and_uneven_shards"),
    ],
    ids=", ".join,
)
def test_on_eight_devices(checks):
    result = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, *checks],
        env={**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"},
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
