"""The kernels for GPUs over shards: the five sums meet in one all-reduce."""

import socket
import subprocess
import sys

from tests.torch.triton.processes import needs_triton

pytestmark = needs_triton


def test_on_two_ranks_dtensors_follow_the_eager_step():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.triton.sharded"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), port], **pipes) for rank in range(2)]
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
