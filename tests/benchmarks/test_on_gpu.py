"""The command that measures on a GPU, run on a CPU: it gets to its end, and says what is missing."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.speed import device_parts, device_report, on_gpu
from benchmarks.speed.device import Device
from benchmarks.speed.launches import gpt2

CPU = Device(torch.device("cpu"), tiny=True, rounds=1)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["on_gpu", *map(str, arguments)])
    on_gpu.main()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A record of all parts."""
    path = tmp_path_factory.mktemp("record") / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.speed.on_gpu", "--device", "cpu", "--tiny", "--rounds", "1"]
    done = subprocess.run([*command, "--out", path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return path, done.stdout


def test_it_runs_to_its_end_on_a_cpu_and_says_what_it_left_out(tiny):
    record = json.loads(tiny[0].read_text())
    assert record["about"]["versions"]["torch"] == torch.__version__
    assert {row["contender"] for row in record["steps"]} == {*device_parts.STEPS, *device_parts.PEERS}
    for row in (*record["steps"], *record["training"]):
        assert row.get("skipped") or row["ms"] > 0
    assert on_gpu.problems(record) == []


def test_a_record_is_printed_again_as_it_was(tiny, monkeypatch, capsys):
    run(monkeypatch, "--report", tiny[0])
    printed = capsys.readouterr().out
    assert printed == tiny[1]
    assert "The figures mean nothing" in printed
    assert "| Mechanic(AdamW) |" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "this measures on a GPU, and torch sees none"),
        (["--tiny"], "--device cpu --tiny tries the command itself"),
        (["--device", "cpu"], "this measures on a GPU"),
    ],
)
def test_without_a_gpu_it_says_that_it_needs_one(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, *arguments)


def test_the_model_has_the_shapes_of_gpt_2():
    with torch.device("meta"):
        model = device_parts.gpt(Device(torch.device("meta"), tiny=False, rounds=1))
    assert sorted(tuple(p.shape) for p in model.parameters()) == sorted(gpt2())


def test_a_row_that_fails_is_told_and_the_others_are_measured(monkeypatch):
    built = device_parts._built

    def fail(name, params):
        if name == "Mechanic(AdamW)":
            raise RuntimeError("out | of memory")
        return built(name, params)

    monkeypatch.setattr(device_parts, "_built", fail)
    record = on_gpu.measure(CPU)
    failed = "Mechanic(AdamW): RuntimeError: out | of memory"
    assert on_gpu.problems(record) == [f"steps, {failed}", f"steps, {failed}", f"training, {failed}"]
    assert all("ms" in row for row in record["steps"] if row["contender"] == "AdamW fused")
    assert "| Mechanic(AdamW) | failed: RuntimeError: out / of memory |" in device_report.tables(record)


def test_the_tables_of_a_gpu():
    times = {"ms": 2.0, "host_ms": 0.5}
    step = {"dtype": "float32", "kept_bytes": 12.0, "passing_bytes": 0.1}
    record = {
        "about": {"device": "a GPU", "versions": {"torch": "3"}, "rounds": 30, "tiny": False},
        "steps": [
            {"contender": "AdamW fused", **step, **times},
            {"contender": "Mechanic(AdamW)", **step, "ms": 3.0, "host_ms": 0.6},
            {"contender": "Prodigy", "dtype": "float32", "skipped": "prodigyopt is not installed"},
        ],
        "training": [{"contender": "AdamW fused", **times, "peak_gb": 9.5}],
    }
    lines = device_report.tables(record).splitlines()
    assert lines[0] == "a GPU; torch 3; medians of 30"
    for line in (
        "| Mechanic(AdamW) | 3.0 | 0.6 | 1.50 | 12.0 | 0.1 |",
        "| Prodigy | skipped: prodigyopt is not installed |  |  |  |  |",
        "| AdamW fused | 2.0 | 1.00 | 9.5 |",
    ):
        assert line in lines
    assert on_gpu.problems(record) == []
