"""The code that contrib/README.md proposes to other projects, run inside of them."""

from pathlib import Path

from tests.shared.test_docs import blocks_of

PAGE = Path(__file__).parents[2] / "contrib" / "README.md"


def define(name, module):
    """The function of that name, defined as if it stood in the module."""
    (block,) = (block for block in blocks_of(PAGE.read_text(encoding="utf-8")) if f"def {name}(" in block.code)
    namespace = dict(vars(module))
    exec(compile(block.code, str(PAGE), "exec"), namespace)
    return namespace[name]
