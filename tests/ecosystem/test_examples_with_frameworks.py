"""Every example with a framework runs as it stands. Those left out here run in the tests of their framework."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="has an environment of its own: make test-ecosystem")

ELSEWHERE = {"accelerate_loop", "deepspeed_zero", "diffusion", "log_to_boards", "timm_factory"}
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "frameworks").glob("*.py"))


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.stem not in ELSEWHERE], ids=lambda path: path.stem)
def test_runs_as_it_stands(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
