"""Sharded parameters: the result of one device, and one all-reduce. On eight devices that the host is made to show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("jax_sharded.py")
CHECKS = [line.split()[1].split("(")[0] for line in SCRIPT.read_text().splitlines() if line.startswith("def check_")]


@pytest.mark.parametrize("check", CHECKS)
def test_on_eight_devices(check):
    flags = "--xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, check],
        env={**os.environ, "XLA_FLAGS": flags},
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
