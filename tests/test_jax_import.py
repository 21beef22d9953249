"""What importing mechanic.jax needs and brings."""

import subprocess
import sys


def test_importing_it_imports_no_other_framework():
    """What the others import is in test_readme.py."""
    code = "import sys, mechanic.jax; assert not {'torch', 'flax', 'equinox'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
