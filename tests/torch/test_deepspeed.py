"""DeepSpeed's ZeRO: stages 0 to 2 follow one process, or are refused where they could not; stage 3 is refused.

In an environment of its own, ``make test-deepspeed``.
"""

import itertools
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from mechanic.torch import Mechanic
from tests.torch import parallel

pytest.importorskip("deepspeed", reason="has an environment of its own: make test-deepspeed")

TIMEOUT = 300
GROUPS = ("one", "two", "apart")  # one param group; two that share a tuner; two with their own
RIGHT = {(0, groups, None) for groups in GROUPS} | {(stage, g, "WORLD") for stage in (1, 2) for g in ("one", "apart")}
REFUSED = {
    **{(stage, groups, None): "process_group=torch.distributed.group.WORLD" for stage in (1, 2) for groups in GROUPS},
    **{(stage, "two", "WORLD"): "group by group" for stage in (1, 2)},
    **{(3, groups, group): "ZeRO stage 3" for groups in GROUPS for group in (None, "WORLD")},
}


def engine_of(stage, groups, group, base):
    import deepspeed

    model = parallel.Model()
    cls, arguments = parallel.BASES[base]
    params = parallel.param_groups(model, per_group=groups != "one")
    if groups == "one":
        params = [{"params": params}]
    for param_group in params:
        if groups == "two":
            del param_group["tuner"]
    process_group = dist.group.WORLD if group else None
    optimizer = Mechanic(cls(params, **arguments), process_group=process_group)
    config = {
        "train_batch_size": parallel.BATCH,
        "train_micro_batch_size_per_gpu": parallel.BATCH // dist.get_world_size(),
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0], optimizer


def case(stage, groups, group, base):
    engine, optimizer = engine_of(stage, groups, group, base)
    for step in range(parallel.STEPS):
        engine.backward(parallel.loss_of(engine, step))
        engine.step()
    parallel.assert_follows(parallel.parameters(engine.module), optimizer, parallel.alone(base, groups == "apart"))
    return {}


def main(rank, folder):
    import deepspeed

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    deepspeed.init_distributed("gloo")
    results = {}
    for setting, base in itertools.product([*sorted(RIGHT, key=str), *REFUSED], parallel.BASES):
        try:
            results[(*setting, base)] = case(*setting, base)
        except (AssertionError, RuntimeError, ValueError) as error:
            results[(*setting, base)] = {"refused": str(error), "at": traceback.format_exc()}
        dist.barrier()
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")


def test_every_stage_is_right_or_refused(tmp_path):
    parallel.on_ranks(main, 2, TIMEOUT, str(tmp_path))
    for (*setting, base), report in torch.load(tmp_path / "results.pt", weights_only=False).items():
        if tuple(setting) in RIGHT:
            assert not report, (setting, base, report["at"])
        else:
            assert REFUSED[tuple(setting)] in report.get("refused", ""), (setting, base, report)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_example_runs_as_it_stands(stage):
    example = Path(__file__).parents[2] / "examples" / "frameworks" / "deepspeed_zero.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    result = subprocess.run(
        [*command, "--stage", str(stage)],
        check=True,
        timeout=TIMEOUT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+),", result.stdout)]
    assert losses[-1] < losses[0] / 2
