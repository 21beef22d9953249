"""Every Python block of the README and the docs runs, page by page and in order.

Each page has one namespace, which begins with ``START``. What a page needs beyond that stands in a comment that readers
do not see, ``<!-- run first: ... -->``. A block below ``<!-- not run: reason -->`` is only parsed: it needs a GPU or a
framework that is not installed here.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    ROOT / "contrib" / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
START = """
import torch
from mechanic.torch import Mechanic
torch.manual_seed(0)
model = torch.nn.Linear(10, 1)
"""
BLOCK = re.compile(
    r"^<!-- run first:\n(?P<hidden>.*?)^-->"
    r"|^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?```python\n(?P<shown>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    code: str
    line: int
    reason: str | None  # not to run it


def blocks_of(text):
    for found in BLOCK.finditer(text):
        part = "hidden" if found["shown"] is None else "shown"
        yield Block(found[part], text.count("\n", 0, found.start(part)), found["reason"])


def run(text, name):
    namespace = {"__name__": name}
    exec(START, namespace)
    for block in blocks_of(text):
        code = compile("\n" * block.line + block.code, name, "exec", dont_inherit=True)  # errors show the page's lines
        if block.reason is None:
            exec(code, namespace)
    return namespace


def with_code():
    return sorted(page for page in PAGES if "```python" in page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", with_code(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page.read_text(encoding="utf-8"), str(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_overlooked(page):
    text = page.read_text(encoding="utf-8")
    assert len(list(blocks_of(text))) == len(re.findall(r"^ *(?:```python|<!-- run first:)", text, re.MULTILINE))
    marked = re.findall(r"^ *<!-- not run:", text, re.MULTILINE)
    assert len(marked) == sum(block.reason is not None for block in blocks_of(text))


def test_blocks_share_a_namespace_and_those_marked_are_parsed_only():
    page = (
        "<!-- run first:\na = 1\n-->\n\n```python\nb = a + 1\n```\n\n<!-- not run: no GPU -->\n```python\n1 / 0\n```\n"
    )
    assert run(page, "page")["b"] == 2
    with pytest.raises(ZeroDivisionError):
        run(page.replace("not run", "was run"), "page")
    with pytest.raises(SyntaxError):
        run(page.replace("1 / 0", "1 /"), "page")
