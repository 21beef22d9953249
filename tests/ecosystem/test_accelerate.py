"""Accelerate on two processes, DDP and FSDP2: as one process trains, and going on from a checkpoint bit for bit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="has an environment of its own: make test-ecosystem")
import accelerate_loop
from mechanic.torch import MechanicMuon
from tests.torch import parallel

TIMEOUT = 300
MIDDLE, END = 9, 18


def parameters(model):
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [p.detach().clone() for p in whole]


def train_twice(accelerator, folder):
    """To the end, and once more from the checkpoint in the middle."""
    from torch import distributed as dist

    found = []
    for _ in range(2):
        model = accelerate_loop.train(accelerator, folder, END, saved_every=MIDDLE)
        found.append(parameters(model))
        accelerator.free_memory()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / str(END))
        dist.barrier()
    return {"sharded": hasattr(model, "unshard"), "parameters": found}


def main(rank, folder):
    from accelerate import DistributedType, PartialState

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29500 + os.getppid() % 1000))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    accelerator = accelerate_loop.make_accelerator()
    results = {"ddp": train_twice(accelerator, Path(folder) / "ddp")}
    # Accelerate takes FSDP for accelerators only. Told that it has one, all it does runs on CPU as well.
    PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate_loop.sharding()
    results["fsdp2"] = train_twice(accelerator, Path(folder) / "fsdp2")
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    accelerator.end_training()


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    parallel.on_ranks(main, 2, TIMEOUT, str(folder))
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_two_ranks_train_as_one_and_resume_bit_for_bit(layout, on_two_ranks, tmp_path):
    accelerator = accelerate_loop.make_accelerator()
    expected = parameters(accelerate_loop.train(accelerator, tmp_path, END))
    whole, resumed = on_two_ranks[layout]["parameters"]
    assert on_two_ranks[layout]["sharded"] == (layout == "fsdp2")
    for one, two, again in zip(expected, whole, resumed, strict=True):
        assert two.equal(again)
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)  # sums of two ranks round differently


def test_muon_without_learning_rates_resumes_bit_for_bit(tmp_path):
    def train(first):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        accelerator = accelerate_loop.make_accelerator()
        model, optimizer = accelerator.prepare(model, MechanicMuon(model))
        if first:
            accelerator.load_state(str(tmp_path))
        for step in range(first, END):
            inputs = torch.randn(48, 64, generator=torch.Generator().manual_seed(step))
            accelerator.backward(model(inputs).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == MIDDLE and not first:
                accelerator.save_state(str(tmp_path))
        return parameters(model), optimizer.optimizer.scales()

    (whole, scales), (resumed, same) = train(0), train(MIDDLE)
    assert scales == same
    assert scales["default"] > 0
    assert all(a.equal(b) for a, b in zip(whole, resumed, strict=True))


def test_the_example_runs_as_it_stands(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [accelerate_loop.__file__, "--checkpoints", str(tmp_path)]
    result = subprocess.run(
        command, check=True, timeout=TIMEOUT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert "step 18: loss" in result.stdout
