"""Everything that needs a GPU to be known, in one command: ``make gpu``, or ``python -m benchmarks.speed.on_gpu``.

Times of steps, memory, and training of a GPT of 124M parameters. One record is written, and printed as tables;
``--report FILE`` prints one that was written earlier.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import device_parts, device_report
from benchmarks.speed.device import Device
from benchmarks.suite import recordbook

NEEDS_A_GPU = (
    "this measures on a GPU, and torch sees none (torch.cuda.is_available() is False). "
    "--device cpu --tiny tries the command itself, on toys and without any meaning"
)


def measure(device: Device) -> dict[str, Any]:
    """The whole record."""
    record: dict[str, Any] = {"about": device.about()}
    for name, part in (("steps", device_parts.steps), ("training", device_parts.training)):
        print(f"{name} ...", file=sys.stderr, flush=True)
        record[name] = part(device)
    return record


def problems(record: dict[str, Any]) -> list[str]:
    """What failed."""
    return [
        f"{part}, {row['contender']}: {row['failed']}"
        for part in ("steps", "training")
        for row in record[part]
        if "failed" in row
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.on_gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...; cpu only with --tiny")
    parser.add_argument("--tiny", action="store_true", help="toys, and no record unless --out says where")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="where to write the record; else a name made from the device's")
    parser.add_argument("--report", type=Path, metavar="FILE", help="only print the tables of a record")
    arguments = parser.parse_args()
    if arguments.report:
        print(device_report.tables(json.loads(arguments.report.read_text(encoding="utf-8"))))
        return
    on_cpu = torch.device(arguments.device).type == "cpu"
    if not (torch.cuda.is_available() or (on_cpu and arguments.tiny)):
        raise SystemExit(NEEDS_A_GPU)
    if on_cpu:
        if not arguments.tiny:
            raise SystemExit("a CPU is only for --tiny; python -m benchmarks.speed measures CPUs")
        torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch and the peers; failures are in the record
    torch.set_float32_matmul_precision("high")
    device = Device(torch.device(arguments.device), arguments.tiny, arguments.rounds)
    if device.is_gpu:
        torch.cuda.set_device(device.torch_device)
    record = measure(device)
    out = arguments.out
    if out is None and not arguments.tiny:
        name = re.sub(r"[^a-z0-9]+", "-", record["about"]["device"].lower()).strip("-")
        out = recordbook.RECORDS / "speed" / f"gpu-{name}.json"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written to {out}", file=sys.stderr)
    print(device_report.tables(record))
    if found := problems(record):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
