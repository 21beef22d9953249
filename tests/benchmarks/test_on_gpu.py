"""The command that measures on a GPU, run on a CPU: it gets to its end, and says what is missing."""

import json
import sys

import pytest
import torch

from benchmarks.speed import device_parts, device_report, on_gpu
from benchmarks.speed.device import Device
from benchmarks.speed.launches import gpt2

TINY = ("--device", "cpu", "--tiny", "--rounds", "1")


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)  # other tests want it as it was

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["on_gpu", *map(str, arguments)])
        on_gpu.main()
        return capsys.readouterr().out

    return run


def test_it_runs_to_its_end_on_a_cpu_and_prints_its_record_again(run, tmp_path):
    path = tmp_path / "gpu.json"
    printed = run(*TINY, "--out", path)
    record = json.loads(path.read_text())
    assert record["about"]["versions"]["torch"] == torch.__version__
    assert {row["contender"] for row in record["steps"]} == {*device_parts.STEPS, *device_parts.PEERS}
    assert all(row.get("skipped") or row["ms"] > 0 for row in (*record["steps"], *record["training"]))
    assert on_gpu.problems(record) == []
    assert run("--report", path) in printed
    assert "The figures mean nothing" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "this measures on a GPU, and torch sees none"),
        (["--tiny"], "--device cpu --tiny tries the command itself"),
        (["--device", "cpu"], "this measures on a GPU"),
    ],
)
def test_without_a_gpu_it_says_that_it_needs_one(arguments, message, monkeypatch, run):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=message):
        run(*arguments)


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
    record = on_gpu.measure(Device(torch.device("cpu"), tiny=True, rounds=1))
    failed = "Mechanic(AdamW): RuntimeError: out | of memory"
    assert on_gpu.problems(record) == [f"steps, {failed}", f"steps, {failed}", f"training, {failed}"]
    assert all("ms" in row for row in record["steps"] if row["contender"] == "AdamW fused")
    assert "| Mechanic(AdamW) | failed: RuntimeError: out / of memory |" in device_report.tables(record)
