"""What Mechanic costs over the bare base: ``python -m benchmarks.speed`` measures, ``--report`` only reads.

Times are CPU seconds of one thread, which other work on the machine disturbs less than the clock's, or seconds that
pass where there are two threads; of contender and reference by turns, as ratios of medians. Every cell has a process of
its own, and every figure of memory too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.speed import measure, records
from benchmarks.speed.contenders import CELLS, REMEMBERED


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--report", action="store_true", help="only print the tables and draw the figure")
    parser.add_argument("--only", nargs=2, metavar=("PART", "CELL"), help="measure one cell in this process")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    arguments = parser.parse_args()
    if arguments.only:
        torch.set_num_threads(1)
        part, cell = arguments.only
        if part == "step":
            measure.steps(cell, arguments.rounds)
        elif part == "training":
            measure.training(arguments.rounds)
        elif part == "memory":
            measure.memory(cell)
        else:
            measure.bandwidth()
        return
    if not arguments.report:
        parts = [("bandwidth", "50M"), *(("step", cell) for cell in CELLS), ("training", "GPT")]
        for part, cell in [*parts, *(("memory", name) for name in REMEMBERED)]:
            command = [sys.executable, "-m", "benchmarks.speed", "--only", part, cell]
            subprocess.run([*command, "--rounds", str(arguments.rounds)], check=True, env=os.environ)
    from benchmarks.speed import report  # here, so that no process that measures loads matplotlib

    found = records.read()
    print(report.tables(found))
    report.draw(found, arguments.out)


if __name__ == "__main__":
    main()
