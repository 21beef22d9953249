"""Every number in the text of the page on results is taken from a generated table, or is one that defines something."""

import re

import pytest

from benchmarks.report.results import BASES, FAMILIES
from tests.benchmarks.runs import DOCS

TABLE = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
NOT_TEXT = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
WORDS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
SGD, ADAMW, _, LION = BASES.values()
PAPER, PYTORCH, ADAPTATION, PRODIGY = (
    FAMILIES[name] for name in ("mechanic-paper", "mechanic-pytorch", "d-adaptation", "prodigy")
)
DOG, BOTH = FAMILIES["dog"], FAMILIES["prodigy-plus-schedule-free"]

# What defines a figure, names a thing, or says how something was done. None of it was measured.
DEFINED = (
    "within 2 %",
    "Counting runs that beat the tuned optimizer as 0",
    "more than 5 % behind",
    "So 0 is the same base optimizer",
    "100 % has learned nothing",
    "Below 0 is better",
    "diverges counts as 100 %",
    "at a learning rate of 0.",
    '"Gains as 0" is the mean if a ρ below 0 counts as 0',
    "with gains as 0, and 95 % intervals",
    "plus 2 or 5 % of its improvement",
    "profile: 1 if a method",
    "takes 4 times as long",
    "adds 0.",
    "evaluated at 14 points",
    "CLINC150",
    "With gains as 0 the mean is",
    "behind, with gains as 0",
    "runs are above 5 %",
    "above the 10 % that we aim for",
    "resnet-cifar100",
    "CIFAR-100 histograms",
    "on 100 classes",
    "first seed, 16 tasks",
    "A start of .1 instead of .01",
)


@pytest.fixture(scope="module")
def tables():
    """By name and row, the cells by the head of their column, of the page and of the one that it leads to."""
    found = {}
    for page in ("results.md", "results-by-task.md"):
        for name, text in TABLE.findall((DOCS / page).read_text(encoding="utf-8")):
            head, _, *lines = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in text.splitlines()]
            found[name] = {line[0]: dict(zip(head[1:], line[1:], strict=True)) for line in lines}
    return found


def claims_of(tables):
    """What the page says, word by word, as its tables have it today."""
    summary, bases, losing, per_task = (tables[name] for name in ("summary", "bases", "losing", "per-task"))
    ours, tested, early = summary["Mechanic"], tables["summary-test"]["Mechanic"], tables["early"]["Mechanic"]

    def whole(cell):
        return f"{abs(float(cell.split()[0])):.0f}"

    def signed(cell):
        return cell.replace("-", "−")

    zero = "gains as 0"
    behind = sorted(float(summary[name][zero]) for name in (PRODIGY, ADAPTATION, DOG))
    above_10 = sum(float(row["ρ %"]) > 10 for row in losing.values())
    clinc = [whole(per_task[f"bert-clinc150{kind}"][SGD]) for kind in ("", "-dropout0.1")]
    cifar, lstm = losing[f"resnet-cifar100, {LION}"], per_task["lstm-tatoeba"]
    return (
        f"After 50 steps of a logistic regression Mechanic is {early['convex, 50 steps'].split()[0]} % behind",
        f"it is {early['others, 10% of the steps'].split()[0]} % behind after a tenth of the steps",
        f"We trained {len(tables['peers'])} tasks with {len(bases)} base optimizers each",
        f"On **{ours['ρ ≤ 2 %']} of {ours['runs']} runs**",
        f"The median gap is {ours['median']} %",
        f"the mean gap is **{ours[zero]} %**. With AdamW alone it is {bases[ADAMW]['mean ρ %, gains as 0']} %",
        f"- {WORDS[len(losing)]} runs are more than",
        f"the median gap is {tested['median']} % and the mean {tested[zero]} %, with gains as 0",
        f"**The mean of {signed(ours['mean ρ %'])} %**",
        f"Mechanic is {' and '.join(clinc)} % better than tuned",
        f"the mean is {ours[zero]} %",
        f"are {whole(summary[PAPER][zero])} and {whole(summary[PYTORCH][zero])} % behind",
        f"are {behind[0]:.0f} to {behind[-1]:.0f} % behind",
        f"{summary[BOTH]['mean ρ %']} % on its runs, where ours has {signed(summary[BOTH]['ours on the same'])}",
        f"{WORDS[len(losing)]} runs are above 5 %, and {WORDS[above_10].lower()} above",
        f"with Lion, {whole(cifar['ρ %'])} %, and with SGD, {whole(per_task['resnet-cifar100'][SGD])} %",
        f"These are {cifar['steps']} steps",
        f"goes from {cifar['initial train loss']} to {cifar['tuned']}",
        f"histograms with SGD**, {whole(per_task['convex-cifar100_histograms'][SGD])} %",
        f"**lstm-tatoeba with SGD**, {whole(lstm[SGD])} %",
        f"AdamW on the same task is {whole(lstm[ADAMW])} % better",
    )


def text_of(page):
    return " ".join(NOT_TEXT.sub(" ", TABLE.sub("", page)).split())


def unfounded(text, claims):
    """The numbers that no phrase covers; phrases may overlap."""
    covered = set()
    for phrase in (*claims, *DEFINED):
        for found in re.finditer(re.escape(phrase), text):
            covered.update(range(*found.span()))
    return [found.group() for found in NUMBER.finditer(text) if found.start() not in covered]


def test_every_number_in_the_text_is_from_a_table(tables):
    text = text_of((DOCS / "results.md").read_text(encoding="utf-8"))
    assert [claim for claim in claims_of(tables) if claim not in text] == []
    assert unfounded(text, claims_of(tables)) == []


def test_a_number_that_no_table_has_is_found(tables):
    text = text_of((DOCS / "results.md").read_text(encoding="utf-8"))
    assert unfounded(f"{text} The mean gap is 0.3 %.", claims_of(tables)) == ["0.3"]
    changed = text.replace(claims_of(tables)[3], "On **99 of 100 runs**")
    assert unfounded(changed, claims_of(tables)) == ["99", "100"]


def test_the_page_on_choosing_has_the_same_figures(tables):
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    for base, cells in tables["bases"].items():
        assert re.search(rf"{base} \| {cells['within 2 %']}( tasks)? \| {cells['mean ρ %, gains as 0']} % \|", page)
