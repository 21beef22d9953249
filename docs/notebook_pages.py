"""Notebooks as pages: a parser for Sphinx that makes Markdown of them. It shows the outputs that they hold."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx


class NotebookParser(MystParser):
    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        title, *parts = parts_of(json.loads(inputstring))
        name = Path(document["source"]).name
        super().parse("\n\n".join([title, f"{{download}}`Download this notebook <{name}>`", *parts]), document)


def parts_of(notebook: dict[str, Any]) -> Iterator[str]:
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        printed = "".join(text for output in cell["outputs"] for text in output.get("text", ()))
        if printed:
            yield f"```{{code-block}} text\n:class: output\n\n{printed}\n```"
        for output in cell["outputs"]:
            if image := output.get("data", {}).get("image/png"):
                source = f"data:image/png;base64,{''.join(image).strip()}"
                yield f'```{{raw}} html\n<img alt="{cell["metadata"]["alt"]}" src="{source}">\n```'


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True}
