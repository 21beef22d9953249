"""The README's lines, run as a user would: in an empty environment with nothing but torch and this package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mechanic

ROOT = Path(__file__).parents[2]


def code_blocks():
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


@pytest.mark.slow  # torch is installed anew; `make release-check` does the same with the wheel
def test_the_readmes_lines_run_in_an_empty_environment(tmp_path):
    def run(*command):
        subprocess.run(command, check=True, timeout=600, cwd=tmp_path)

    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", f"torch=={torch.__version__.split('+')[0]}")
    run(python, "-m", "pip", "install", "--quiet", f"{ROOT}[torch]")
    script = tmp_path / "readme.py"
    script.write_text("\n".join(code_blocks()), encoding="utf-8")
    run(python, "-W", "error", script)
    assert len(code_blocks()) == 3


def test_importing_the_core_imports_no_framework():
    check = "import sys, mechanic, mechanic.theory; assert not {'torch', 'jax', 'optax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


@pytest.mark.long
def test_importing_mechanic_torch_imports_no_other_framework():
    others = {"jax", "optax", "torch.distributed.tensor", "transformers", "lightning", "timm"}
    check = f"import sys, mechanic.torch; assert not {others} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


@pytest.mark.long
def test_importing_mechanic_torch_takes_less_than_50_ms_beyond_torch(tmp_path):
    # pip compiles what it installs. A checkout may not be compiled, so the package is copied to where it can be.
    shutil.copytree(Path(mechanic.__file__).parent, tmp_path / "mechanic")
    ours = ("COV", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    clock = "import time, torch; t = time.process_time(); import mechanic.torch; print(time.process_time() - t)"
    runs = [
        subprocess.run(
            [sys.executable, "-c", clock],
            env=env | {"PYTHONPATH": str(tmp_path)},
            check=True,
            timeout=60,
            capture_output=True,
        )
        for _ in range(3)
    ]
    assert list(tmp_path.rglob("*.pyc"))
    assert min(float(run.stdout) for run in runs) < 0.05
