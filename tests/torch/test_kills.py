"""Killed by SIGKILL at random moments and started again, a training ends bit for bit where an undisturbed one does."""

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.torch.hostile import same

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TIMEOUT = 120  # seconds, of one start
LOADING = 0.02  # seconds, about
PHASES = ("load", "gradient", "step", "save", "end")


@dataclasses.dataclass(frozen=True, order=True)
class Moment:
    """A place in the run, and how long after it was reached."""

    step: int
    phase: int  # of PHASES
    later: float = 0.0  # seconds


class Job:
    """One start of a training: its processes, none of which outlives it."""

    def __init__(self, kind, folder):
        self.folder = folder
        rendezvous = folder / f"rendezvous-{time.monotonic_ns()}"
        command = [sys.executable, "-W", "ignore", "-m", "tests.torch.kills", kind, str(folder)]
        arguments = [[]] if kind == "one" else [[str(rank), str(rendezvous)] for rank in range(2)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / "stderr").open("a") as stderr:
            self.processes = [
                subprocess.Popen([*command, *more], stderr=stderr, env=env, cwd=ROOT, **pipes) for more in arguments
            ]
        self.alarm = threading.Timer(TIMEOUT, self.kill_all)
        self.alarm.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.alarm.cancel()
        self.kill_all()
        for process in self.processes:
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def kill_all(self):
        for process in self.processes:
            process.kill()

    def moments(self, rank):
        """Where a rank says it is, as it says so."""
        for line in self.processes[rank].stdout:
            step, phase = line.split()
            yield Moment(int(step), PHASES.index(phase))

    def finish(self):
        """Let it come to its end; returns when every moment of the first rank came, in seconds."""
        for process in self.processes:
            process.stdin.close()
        timeline = [(moment, time.monotonic()) for moment in self.moments(0)]
        codes = [process.wait(TIMEOUT) for process in self.processes]
        assert codes == [0] * len(codes), f"exit codes {codes}: {self.errors()}"
        return timeline

    def kill_at(self, moment, rank):
        """SIGKILL one rank at a moment of its own; returns the phase it died in."""
        victim = self.processes[rank]
        reached = [next(self.moments(rank), None)]
        while reached[-1] is not None and reached[-1] < Moment(moment.step, moment.phase):
            reached.append(next(self.moments(rank), None))
        time.sleep(moment.later)
        assert victim.poll() is None, f"exit code {victim.poll()} before the kill at {moment}: {self.errors()}"
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        reached += self.moments(rank)  # what it said between
        return PHASES[reached[-1].phase]

    def errors(self):
        return (self.folder / "stderr").read_text()[-2000:]


def random_moments(timeline, kills, chosen):
    """Moments to kill at, in the order of the run: half of them uniform in its time, the others inside of phases."""
    stretches = [(moment, end - begin) for (moment, begin), (_, end) in itertools.pairwise(timeline)]
    moments, loading = [], []
    for kill in range(kills):
        phase = (None, "step", None, "save", None, "step", None, "load")[kill % 8]
        if phase == "load":  # every start has one; what it takes where there is nothing to load says nothing
            loading.append(Moment(-1, PHASES.index("load"), later=chosen.uniform(0, LOADING)))
            continue
        among = [stretch for stretch in stretches if phase in (None, PHASES[stretch[0].phase])]
        moment, seconds = chosen.choices(among, weights=[seconds for _, seconds in among])[0]
        moments.append(dataclasses.replace(moment, later=chosen.uniform(0, seconds)))
    moments.sort()
    for moment in loading:
        moments.insert(chosen.randint(1, len(moments)), moment)
    return moments


def assert_kills_leave_no_trace(kind, kills, tmp_path, capsys):
    seed = int(os.environ.get("MECHANIC_KILLS_SEED", time.time_ns() % 1_000_000))
    chosen = random.Random(seed)
    folders = undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in folders:
        folder.mkdir()
    with Job(kind, undisturbed) as job:
        timeline = job.finish()
    died_in = []
    for moment in random_moments(timeline, kills, chosen):
        with Job(kind, disturbed) as job:
            died_in.append(job.kill_at(moment, rank=chosen.randrange(len(job.processes))))
        assert not list(disturbed.glob("end*"))
    with Job(kind, disturbed) as job:
        job.finish()
    counts = ", ".join(f"{died_in.count(phase)} in {phase}" for phase in PHASES)
    with capsys.disabled():
        sys.stdout.write(f"\n{kind}: {len(died_in)} kills ({counts}), MECHANIC_KILLS_SEED={seed} ")
    assert len(died_in) == kills
    names = sorted(path.name for path in undisturbed.glob("end*"))
    assert names == (["end.pt"] if kind == "one" else ["end 0.pt", "end 1.pt"])
    for name in names:
        ends = [torch.load(folder / name, weights_only=True) for folder in folders]
        assert ends[0]["scales"]["default"] > 0
        for part in ends[0]:
            assert same(*(end[part] for end in ends)), f"{name}: {part} differs, MECHANIC_KILLS_SEED={seed}"


@pytest.mark.parametrize(("kind", "kills"), [("one", 4), ("fsdp2", 1)])
def test_a_few_kills_leave_no_trace(kind, kills, tmp_path, capsys):
    assert_kills_leave_no_trace(kind, kills, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills"), [("one", 20), ("fsdp2", 5)])
def test_many_kills_leave_no_trace(kind, kills, tmp_path, capsys):
    assert_kills_leave_no_trace(kind, kills, tmp_path, capsys)
