"""What importing mechanic.jax needs and brings."""

import subprocess
import sys

import pytest


def test_importing_it_imports_no_other_framework():
    """What the others import is in test_readme.py."""
    code = "import sys, mechanic.jax; assert not {'torch', 'flax', 'equinox'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_where_a_framework_is_missing_it_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; import mechanic.jax"
    result = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last == f'ModuleNotFoundError: mechanic.jax needs {missing}: pip install "mechanic[jax]"'


def test_an_error_inside_a_framework_is_not_taken_for_a_missing_one():
    code = "import sys; sys.modules['jaxlib'] = None; import mechanic.jax"
    result = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert result.returncode == 1
    assert "jaxlib" in result.stderr.strip().splitlines()[-1]
