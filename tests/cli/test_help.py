"""``mechanic --help``: at once, and without a framework."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mechanic
from tests.cli.running import in_child
from tests.cli.running import mechanic as command


@pytest.mark.parametrize("words", [[], ["try"], ["run"], ["show"]])
def test_every_command_explains_itself(words):
    found = command(*words, "--help")
    assert found.code == 0
    assert found.out.startswith("usage: mechanic")
    assert all(len(line) <= 80 for line in found.out.splitlines())


def test_help_takes_less_than_150_ms_and_imports_no_framework(tmp_path):
    # pip compiles what it installs. A checkout may not be compiled, so the package is copied to where it can be.
    shutil.copytree(Path(mechanic.__file__).parent, tmp_path / "mechanic")
    ours = ("COV", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    code = "import sys; from mechanic.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"

    def run():
        """Its processor time, which other tests do not change as they do the time on the clock; and its output."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        arguments = [sys.executable, "-c", code]
        found = subprocess.run(arguments, env=env | {"PYTHONPATH": str(tmp_path)}, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, found.stdout.decode()

    times, outputs = zip(*(run() for _ in range(7)), strict=True)
    assert "usage: mechanic" in outputs[0]
    assert not {"torch", "jax", "numpy", "tqdm", "matplotlib"} & set(outputs[0].split())
    assert min(times[1:]) < 0.15


def test_the_version_is_told():
    assert command("--version").out == f"mechanic {mechanic.__version__}\n"


@pytest.mark.parametrize("words", [["show", "last.pt"], ["try", "file.py:train", "--lr", "1"]])
def test_without_pytorch_the_command_says_what_to_install(words):
    def run():
        hidden = [name for name in sys.modules if name.partition(".")[0] in ("torch", "mechanic")]
        for name in hidden:
            del sys.modules[name]
        sys.modules["torch"] = None
        from mechanic.cli import main

        return main(words)

    found = in_child(run)
    assert found.code == 1
    assert found.err == 'mechanic needs PyTorch: pip install "mechanic[torch]"\n'
