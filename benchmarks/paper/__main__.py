"""Starts a recipe: ``torchrun --nproc-per-node N -m benchmarks.paper RECIPE``."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import distributed as dist

from benchmarks.paper.run import parse, run


def main() -> None:
    arguments = parse()
    if "RANK" not in os.environ:
        raise SystemExit("one process per device: torchrun --nproc-per-node N -m benchmarks.paper RECIPE")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Rank 0 may be downloading while the others wait.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(hours=2))
    run(arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
