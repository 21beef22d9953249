"""A script and all that it needs of mechanic as one file, for contests that take no more than that and torch.

python -m benchmarks.single_file examples/muon_gpt.py > alone.py
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import mechanic

NOT_NEEDED = ("__main__", "cli", "integrations", "jax")
LOADER = '''
import importlib.abc
import importlib.util
import sys


class Inside(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds the modules of mechanic in this file, before any that is installed."""

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name in SOURCES else None

    def is_package(self, name):
        return any(other.startswith(f"{name}.") for other in SOURCES)

    def get_source(self, name):
        return SOURCES[name]

    def get_code(self, name):
        return compile(SOURCES[name], f"{name}.py", "exec")


SOURCES = {}
sys.meta_path.insert(0, Inside())
'''


def sources() -> dict[str, str]:
    """Those of mechanic and mechanic.torch, by module."""
    [folder] = map(Path, mechanic.__path__)
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[0] not in NOT_NEEDED:
            found[".".join(("mechanic", *parts)).removesuffix(".__init__")] = path.read_text()
    return found


def as_single_file(script: str) -> str:
    """The script's docstring, mechanic, and the rest of the script."""
    first = ast.parse(script).body[0]
    lines = script.splitlines(keepends=True)
    end = first.end_lineno if isinstance(first, ast.Expr) else 0
    embedded = "".join(f'\nSOURCES["{name}"] = {_literal(source)}\n' for name, source in sources().items())
    return f"{''.join(lines[:end])}{LOADER}{embedded}{''.join(lines[end:])}"


def _literal(source: str) -> str:
    """As it is read, where that is possible."""
    is_plain = "'''" not in source and not source.endswith(("'", "\\"))
    return f"r'''{source}'''" if is_plain else repr(source)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.single_file", description=__doc__)
    parser.add_argument("script", type=Path)
    print(as_single_file(parser.parse_args().script.read_text()), end="")
