"""Every Python block of the README and the docs runs, page by page and in order.

Each page has one namespace, which begins with ``START``. What a page needs beyond that stands in a comment that readers
do not see, ``<!-- run first: ... -->``. A block below ``<!-- not run: reason -->`` is only parsed: it needs a GPU or a
framework that is not installed here.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

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
    hidden: bool


def blocks_of(text):
    for found in BLOCK.finditer(text):
        part = "hidden" if found["shown"] is None else "shown"
        yield Block(found[part], text.count("\n", 0, found.start(part)), found["reason"], part == "hidden")


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


def test_no_block_is_overlooked():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        begun = re.findall(r"^ *(?:```python|<!-- run first:)", text, re.MULTILINE)
        marked = re.findall(r"^ *<!-- not run:", text, re.MULTILINE)
        blocks = list(blocks_of(text))
        assert (len(begun), len(marked)) == (len(blocks), sum(block.reason is not None for block in blocks)), page


def test_no_line_of_code_is_cut():
    """The column of text has room for 92 characters."""
    for page in with_code():
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
            assert [line for line in block.splitlines() if len(line) > 92] == [], page


def anchors(text):
    """Of the headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


OUTSIDE = [page for page in PAGES if page.parent.name != "docs"]  # where Sphinx looks itself


def test_links_between_pages_lead_somewhere():
    for page in OUTSIDE:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), (page, link)


@pytest.mark.long
def test_what_newcomers_copy_passes_mypy_strict(tmp_path):
    """README and quickstarts, each page as a file with the page's lines. torch's own ``backward`` is untyped."""
    pytest.importorskip("mypy", reason="in the group of checks")
    pages = [ROOT / "README.md", ROOT / "docs" / "start.md", *sorted((ROOT / "docs").glob("quickstart-*.md"))]
    hidden = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        lines = ["# mypy: allow-redefinition, allow-untyped-calls", *[""] * text.count("\n")]
        lines[1] = f"from typing import Any;{START.strip()};dataset: Any;accelerator: Any;schedule: Any;loader: Any"
        lines[1] = lines[1].replace("\n", ";")
        for block in blocks_of(text):
            code = block.code.splitlines()
            lines[block.line : block.line + len(code)] = code
            if block.hidden:
                hidden |= {f"{page.stem}.py:{block.line + 1 + n}:" for n in range(len(code))}
        (tmp_path / f"{page.stem}.py").write_text("\n".join(lines), encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *map(str, sorted(tmp_path.iterdir()))],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in found.stdout.splitlines() if ": error:" in line]
    assert [line for line in complaints if not any(place in line for place in hidden)] == []
    assert found.returncode in (0, 1), found.stderr


# Words that readers had to read twice, and the better ones. "The base" is defined where a page uses it.
WORDS = {
    r"a passing (?!test)": "temporary",
    r"at home in": "works with",
    r"by itself|by themselves": "automatically, or on its own",
    r"cases \|": "runs",
    r"contenders?": "method",
    r"for ever": "forever",
    r"gradients (?:that|which) are not finite": "NaN and inf gradients",
    r"(?:is|are) not noticed": "not detected",
    r"really applied": "effective",
}
CODE = re.compile(r"^```.*?^```|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


def worse_words(text):
    prose = CODE.sub(lambda code: re.sub(r"\S", " ", code[0]), text)  # lines and columns stay
    for word, better in WORDS.items():
        phrase = word.replace(" ", r"\s+")
        for found in re.finditer(rf"\b(?:{phrase})(?!\w)", prose, re.IGNORECASE):
            yield f"line {prose.count(chr(10), 0, found.start()) + 1}: {found[0]!r}, better: {better}"


def test_words_are_plain():
    found = {str(page): list(worse_words(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert {page: worse for page, worse in found.items() if worse} == {}


def test_worse_words_are_found_in_prose_and_not_in_code():
    assert list(worse_words("A run.\n\nIt trains by\nitself.")) == [
        "line 3: 'by\\nitself', better: automatically, or on its own"
    ]
    assert list(worse_words("`Contender`\n```python\ncontender\n```\n[that](contender.md)")) == []


NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_every_notebook_runs(notebook, monkeypatch):
    import matplotlib.pyplot as plt  # tests/ecosystem imports this file without it

    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    threads = torch.get_num_threads()
    namespace = {"__name__": notebook.stem}
    try:
        with plt.rc_context():
            plt.switch_backend("Agg")
            for cell in code_cells(notebook):
                exec(compile("".join(cell["source"]), str(notebook), "exec", dont_inherit=True), namespace)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_the_outputs_of_a_notebook_are_of_one_run_and_its_pictures_are_described(notebook):
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [(cell, output) for cell in cells for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for _, output in outputs)
    drawn = [cell for cell, output in outputs if "image/png" in output.get("data", {})]
    assert len(drawn) == 2
    assert all(cell["metadata"]["alt"] for cell in drawn)


def test_blocks_share_a_namespace_and_those_marked_are_parsed_only():
    page = (
        "<!-- run first:\na = 1\n-->\n\n```python\nb = a + 1\n```\n\n<!-- not run: no GPU -->\n```python\n1 / 0\n```\n"
    )
    assert run(page, "page")["b"] == 2
    with pytest.raises(ZeroDivisionError):
        run(page.replace("not run", "was run"), "page")
    with pytest.raises(SyntaxError):
        run(page.replace("1 / 0", "1 /"), "page")
