"""Fills the tables of the pages on results from the records, and draws their figures."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.report import figures, muon, studies, tables
from benchmarks.report.results import Results
from benchmarks.suite.recordbook import RecordBook

PAGES = ("results.md", "results-by-task.md", "tried.md", "benchmarks.md")
TABLES = {**tables.TABLES, **studies.TABLES, **muon.TABLES}  # by the name under which a page asks for them


def fill(page: str, results: Results) -> str:
    """Put every table between the marks that name it."""
    for name, make in TABLES.items():
        marks = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page = re.sub(marks, lambda found, make=make: f"{found[1]}{make(results)}\n{found[2]}", page, flags=re.DOTALL)
    return page


def write(folder: Path, out: Path, seeds: int = 3) -> None:
    """Fill the tables of the pages on results, and draw their figures."""
    results = Results(RecordBook(folder).records, seeds)
    out.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        path = out / page
        text = path.read_text(encoding="utf-8") if path.exists() else marks_of_all_tables()
        path.write_text(fill(text, results), encoding="utf-8")
    figures.draw_all(results, out / "figures")


def marks_of_all_tables() -> str:
    return "\n\n".join(f"<!-- table: {name} -->\n<!-- end -->" for name in TABLES)
