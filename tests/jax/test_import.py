"""What importing mechanic.jax needs and brings. What the others import is in test_readme.py."""

import subprocess
import sys

import pytest

TRIES = """
import sys

def try_without(missing):
    sys.modules[missing] = None
    try:
        import mechanic.jax
    except ModuleNotFoundError as error:
        print(error)
    del sys.modules[missing]

"""


def tries(code):
    result = subprocess.run(
        [sys.executable, "-c", TRIES + code], timeout=60, check=True, capture_output=True, text=True
    )
    return result.stdout.splitlines()


@pytest.mark.long
def test_importing_it_imports_no_other_framework_and_says_which_is_missing():
    told = tries("""
try_without("jax")
try_without("optax")
import mechanic.jax
assert not {"torch", "flax", "equinox"} & set(sys.modules)
""")
    assert told == [f'mechanic.jax needs {name}: pip install "mechanic[jax]"' for name in ("jax", "optax")]


def test_an_error_inside_a_framework_is_not_taken_for_a_missing_one():
    (told,) = tries('try_without("jaxlib")')
    assert "jaxlib" in told
    assert "mechanic" not in told
