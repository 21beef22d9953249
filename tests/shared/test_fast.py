"""The list of fast tests names tests that there are."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_fast_test_exists():
    missing = []
    for line in (TESTS / "fast.txt").read_text().splitlines():
        path, *_, name = line.split("::")
        tree = ast.parse((TESTS.parent / path).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if name.partition("[")[0] not in names:
            missing.append(line)
    assert missing == []
