"""Fills the tables of the pages on results from the records, and draws their figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.contest import plan as contest
from benchmarks.report import figures, muon, sceptic, studies, tables, verdict, wider
from benchmarks.report.results import Results
from benchmarks.suite.recordbook import RecordBook

PAGES = ("results.md", "results-by-task.md", "results-wider.md", "tried.md", "muon.md", "memory.md", "verdict.md")
# By the name under which a page asks for them.
TABLES = {**tables.TABLES, **sceptic.TABLES, **studies.TABLES, **muon.TABLES, **wider.TABLES}
OF_THE_CONTEST = verdict.TABLES
Tables = dict[str, Callable[[], str]]


def tables_of(records: Path) -> Tables:
    results = Results(RecordBook(records).records)
    judgement = judgement_of(records)
    found: Tables = {name: partial(make, results) for name, make in TABLES.items()}
    return found | {name: partial(make, judgement) for name, make in OF_THE_CONTEST.items()}


def judgement_of(records: Path) -> verdict.Judgement:
    return verdict.Judgement(RecordBook(records / contest.FOLDER).records)


def fill(page: str, tables: Tables) -> str:
    """Put every table between the marks that name it."""
    for name, make in tables.items():
        marks = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page = re.sub(marks, lambda found, make=make: f"{found[1]}{make()}\n{found[2]}", page, flags=re.DOTALL)
    return page


def write(folder: Path, out: Path) -> None:
    """Fill the tables of the pages on results, and draw their figures."""
    tables = tables_of(folder)
    out.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        path = out / page
        text = path.read_text(encoding="utf-8") if path.exists() else marks_of(tables)
        path.write_text(fill(text, tables), encoding="utf-8")
    figures.draw_all(Results(RecordBook(folder).records), judgement_of(folder), out / "figures")


def marks_of(tables: Tables) -> str:
    return "\n\n".join(f"<!-- table: {name} -->\n<!-- end -->" for name in tables)
