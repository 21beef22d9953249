"""What the package's metadata has of the project's address: links, and a README whose links also work elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {"Documentation": "tree/main/docs", "Source": "", "Issues": "issues", "Changelog": "blob/main/CHANGELOG.md"}


class CustomMetadataHook(MetadataHookInterface):
    """``address`` is set in pyproject.toml, in the section of this hook. Without it there are no links."""

    def update(self, metadata: dict[str, Any]) -> None:
        address = self.config["address"].rstrip("/")
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(readme, address) if address else readme}
        metadata["urls"] = {name: f"{address}/{page}".rstrip("/") for name, page in PAGES.items()} if address else {}


def absolute(text: str, address: str) -> str:
    """Links and pictures that are relative in the repository, with its address in front."""

    def link(found: re.Match[str]) -> str:
        is_picture, label, target = found.groups()
        return f"{is_picture}[{label}]({address}/{'raw' if is_picture else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", link, text)
