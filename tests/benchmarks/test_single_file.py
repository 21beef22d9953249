"""A script and mechanic in one file give the numbers that they give apart."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.single_file import as_single_file, sources

SCRIPT = Path(__file__).parents[2] / "examples" / "muon_gpt.py"
CHECK = """
import inspect
own = {name for name in sys.modules if name.split(".")[0] == "mechanic"}
assert "mechanic.torch.step" in own and own <= SOURCES.keys()
assert not hasattr(sys.modules["mechanic"], "__file__")
assert "def step(" in inspect.getsource(sys.modules["mechanic.torch.step"].step)
"""


def printed(path, folder):
    command = [sys.executable, path, "--steps", "12", "--width", "32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MECHANIC_DATA": ""}
    return subprocess.run(command, cwd=folder, env=environment, check=True, timeout=300, capture_output=True, text=True)


def test_one_file_gives_the_numbers_of_the_script(tmp_path):
    alone = tmp_path / "alone.py"
    alone.write_text(as_single_file(SCRIPT.read_text()) + CHECK)
    expected = printed(SCRIPT, tmp_path).stdout
    assert "held-out loss" in expected
    assert printed(alone, tmp_path).stdout == expected


def test_its_help_is_the_scripts(tmp_path):
    text = as_single_file(SCRIPT.read_text())
    assert text.startswith('"""A GPT on real text with Muon and no learning rate')


@pytest.mark.parametrize("source", ["text = '''a'''\n", "x = 'a'", r"x = 1 # \ "[:-1], 'r"""\\d"""\n'])
def test_every_source_is_kept_as_it_is(source, monkeypatch):
    monkeypatch.setattr("benchmarks.single_file.sources", lambda: {"mechanic.odd": source})
    found = {}
    exec(as_single_file("pass\n").replace("sys.meta_path.insert(0, Inside())", ""), found)
    assert found["SOURCES"]["mechanic.odd"] == source


def test_it_has_all_of_torchs_part_and_nothing_of_the_others():
    found = sources()
    assert {"mechanic", "mechanic.tuner", "mechanic.torch", "mechanic.torch.lists"} <= found.keys()
    assert not any(name.startswith(("mechanic.jax", "mechanic.cli", "mechanic.integrations")) for name in found)
