"""examples/fsdp2.py under torchrun: killed in mid-training it ends where an undisturbed run does, on any ranks."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.long

TIMEOUT = 240  # seconds
EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"


def torchrun(ranks, checkpoints, steps, *options, kill_after=None):
    """Run the example; with ``kill_after`` SIGKILL rank 1 once that step has been made.

    Returns the exit code and how often the ranks were started.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", *options]
    command += [str(EXAMPLE), "--checkpoints", str(checkpoints), "--steps", str(steps)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Else restarted ranks find the addresses of the dead: torchrun keeps one store for all starts (torch 2.13).
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    started = []  # rank and process of every worker, also of those that were killed

    def end_all():
        process.kill()
        for _, pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    alarm = threading.Timer(TIMEOUT, end_all)
    alarm.start()
    try:
        for line in process.stdout:
            # Ranks may write into one line.
            started += [(int(rank), int(pid)) for rank, pid in re.findall(r"rank (\d+) of \d+ is process (\d+)", line)]
            if kill_after and f"step {kill_after}:" in line:
                os.kill(dict(started)[1], signal.SIGKILL)
                kill_after = None
        code = process.wait()
    finally:
        alarm.cancel()
        end_all()
        process.stdout.close()
        process.wait()
    return code, [rank for rank, _ in started].count(0)


def parameters(checkpoints, step, scratch):
    dcp_to_torch_save(checkpoints / str(step), scratch)
    return torch.load(scratch, weights_only=False)["model"]


def finish(ranks, checkpoints, steps):
    """Start the job, again where it dies: connecting on loopback may fail, and it continues where it was."""
    for _ in range(3):
        torchrun(ranks, checkpoints, steps)
        if (checkpoints / "latest").exists() and (checkpoints / "latest").read_text() == str(steps):
            return
    raise AssertionError(f"{checkpoints} did not get to step {steps} in three starts")


def assert_same(folders, step, scratch, tolerance):
    found, expected = (parameters(folder, step, scratch) for folder in folders)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


def test_a_killed_job_continues_on_the_same_or_another_number_of_ranks(tmp_path):
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    finish(2, undisturbed, 30)
    code, started = torchrun(2, disturbed, 20, "--max-restarts", "4", kill_after=14)
    assert code == 0
    assert started >= 2
    assert_same((disturbed, undisturbed), 20, tmp_path / "state.pt", tolerance=0.0)
    finish(3, disturbed, 30)
    assert_same((disturbed, undisturbed), 30, tmp_path / "state.pt", tolerance=1e-6)
