"""Runs jobs in processes of their own: ``python -m benchmarks.failures.processes JOB CONTENDER FOLDER RANK RANKS``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.failures.contenders import CONTENDERS, Contender
from benchmarks.failures.task import Training, batch
from benchmarks.failures.verdicts import ErrorInAnotherProcess, is_deliberate, text_of

TIMEOUT = 100.0  # seconds, for one job
STEPS = 100


def start(job: str, contender: str, folder: Path, ranks: int = 1, killed_on_purpose: bool = False) -> None:
    """Run a job on so many processes, all of which are gone when this returns. Raises the first rank's error."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rendezvous-{job}").unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.failures.processes", job, contender, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    started = [subprocess.Popen([*command, str(rank), str(ranks)], **silent) for rank in range(ranks)]
    deadline = time.monotonic() + TIMEOUT
    try:
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started):
                break  # the others may wait for it for ever
            if time.monotonic() > deadline:
                raise TimeoutError(f"{job} did not end in {TIMEOUT:.0f} s")
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.wait()
    if killed_on_purpose or all(process.returncode == 0 for process in started):
        return
    for rank in range(ranks):
        report = folder / f"error-{job}-{rank}.json"
        if report.exists():
            raise ErrorInAnotherProcess(**json.loads(report.read_text()))
    raise ErrorInAnotherProcess(f"exit codes {[process.returncode for process in started]}", is_deliberate=False)


# One process that is killed.


class _Kill(TorchDispatchMode):
    """End the process at the tenth operation."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if self.operations == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return func(*args, **(kwargs or {}))


def _train(contender: Contender, folder: Path, killed_at: int | None) -> list[Tensor]:
    training = Training(contender)
    file, first = folder / "checkpoint.pt", 0
    if file.exists():
        saved = torch.load(file, weights_only=False)
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, 60):
        training.optimizer.zero_grad()
        training.backward(step)
        if step == killed_at:
            with _Kill():
                training.optimizer.step()
        training.optimizer.step()
        if step % 10 == 9:
            states = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save({**states, "step": step + 1}, folder / "new.pt")
            (folder / "new.pt").rename(file)
    return training.values()


def train_and_be_killed(contender: Contender, folder: Path) -> list[Tensor]:
    return _train(contender, folder, killed_at=25)


def train_on(contender: Contender, folder: Path) -> list[Tensor]:
    return _train(contender, folder, killed_at=None)


# Several ranks.


class Sized(nn.Module):
    """Sizes that divide by two, or not, and then a parameter of one element as well."""

    def __init__(self, even: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden, outputs, gains = (8, 4, 2) if even else (7, 3, 1)
        self.first = nn.Linear(8, hidden)
        self.second = nn.Linear(hidden, outputs)
        self.gain = nn.Parameter(torch.ones(gains))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.second(torch.tanh(self.first(inputs)))
        return outputs * self.gain.repeat(outputs.shape[-1] // len(self.gain))


def train_sized(contender: Contender, model: nn.Module) -> None:
    _steps(model, contender.build(model.parameters()), range(STEPS))


def _steps(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Every rank trains on its part of each batch."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for step in steps:
        inputs, targets = (tensor.chunk(ranks)[rank] for tensor in batch(step))
        optimizer.zero_grad()
        outputs = model(inputs)
        (outputs - targets[:, : outputs.shape[-1]]).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module) -> list[Tensor]:
    values: list[Any] = [p.detach() for p in model.parameters()]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]


def ddp(contender: Contender, folder: Path) -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(Sized(even=False))
    train_sized(contender, model)
    return whole(model)


def _sharded(contender: Contender, even: bool) -> tuple[nn.Module, Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Sized(even)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, contender.build(model.parameters(), **dict(contender.options_where_sharded))


def _train_sharded(contender: Contender, even: bool) -> list[Tensor]:
    model, optimizer = _sharded(contender, even)
    _steps(model, optimizer, range(STEPS))
    return whole(model)


def fsdp2_even(contender: Contender, folder: Path) -> list[Tensor]:
    return _train_sharded(contender, even=True)


def fsdp2_uneven(contender: Contender, folder: Path) -> list[Tensor]:
    return _train_sharded(contender, even=False)


def fsdp2_save(contender: Contender, folder: Path) -> list[Tensor]:
    """The first half of the steps, saved with torch.distributed.checkpoint."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = _sharded(contender, even=True)
    _steps(model, optimizer, range(STEPS // 2))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "saved")
    return whole(model)


def fsdp2_resume(contender: Contender, folder: Path) -> list[Tensor]:
    """The second half of the steps, on however many ranks."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = _sharded(contender, even=True)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.load(state, checkpoint_id=folder / "saved")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _steps(model, optimizer, range(STEPS // 2, STEPS))
    return whole(model)


ALONE = (train_and_be_killed, train_on)
ON_RANKS = (ddp, fsdp2_even, fsdp2_uneven, fsdp2_save, fsdp2_resume)


def main(name: str, contender: str, folder: Path, rank: int, ranks: int) -> None:
    """Run a job. Rank 0 writes what it returns, every rank what it raises."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    job = next(job for job in (*ALONE, *ON_RANKS) if job.__name__ == name)
    try:
        if job in ON_RANKS:
            # Prodigy and D-Adaptation move a buffer to the GPU; here it stays where all parameters are.
            torch.Tensor.cuda = lambda self: self
            os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
            rendezvous = f"file://{folder.absolute()}/rendezvous-{name}"
            dist.init_process_group(
                "gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
            )
        result = job(CONTENDERS[contender], folder)
        if rank == 0:
            torch.save(result, folder / "result.pt")
        if job in ON_RANKS:
            dist.barrier()
    except BaseException as error:  # torch.distributed.checkpoint's own is no Exception
        report = {"text": text_of(error), "is_deliberate": is_deliberate(error)}
        (folder / f"error-{name}-{rank}.json").write_text(json.dumps(report))
        os._exit(1)
    os._exit(0)  # threads of process groups may hold up an orderly exit


if __name__ == "__main__":
    own_name, key, where, own_rank, number = sys.argv[1:]
    main(own_name, key, Path(where), int(own_rank), int(number))
