"""A script and mechanic in one file give the numbers that they give apart."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.single_file import as_single_file

SCRIPT = Path(__file__).parents[2] / "examples" / "muon_gpt.py"
CHECK = """
import inspect
own = {name for name in sys.modules if name.split(".")[0] == "mechanic"}
assert "mechanic.torch.step" in own and own <= SOURCES.keys()
assert not any(name.startswith(("mechanic.jax", "mechanic.cli", "mechanic.integrations")) for name in SOURCES)
assert not hasattr(sys.modules["mechanic"], "__file__")
assert "def step(" in inspect.getsource(sys.modules["mechanic.torch.step"].step)
"""


@pytest.mark.long
def test_one_file_gives_the_numbers_of_the_script(tmp_path):
    def printed(path):
        command = [sys.executable, path, "--steps", "12", "--width", "32"]
        options = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1", "MECHANIC_DATA": ""}}
        return subprocess.run(command, **options, check=True, timeout=300, capture_output=True, text=True).stdout

    alone = tmp_path / "alone.py"
    alone.write_text(as_single_file(SCRIPT.read_text()) + CHECK)
    assert alone.read_text().startswith('"""A GPT on real text with Muon and no learning rate')
    expected = printed(SCRIPT)
    assert "held-out loss" in expected
    assert printed(alone) == expected


@pytest.mark.parametrize("source", ["text = '''a'''\n", "x = 'a'", r"x = 1 # \ "[:-1], 'r"""\\d"""\n'])
def test_every_source_is_kept_as_it_is(source, monkeypatch):
    monkeypatch.setattr("benchmarks.single_file.sources", lambda: {"mechanic.odd": source})
    found = {}
    exec(as_single_file("pass\n").replace("sys.meta_path.insert(0, Inside())", ""), found)
    assert found["SOURCES"]["mechanic.odd"] == source
