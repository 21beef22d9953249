"""What a trial comes to: a table, and one sentence that says whether Mechanic was worth it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

POINTS = 400  # of a recorded curve; longer ones are means
TAIL = 0.1  # share of the points whose mean is compared with a final loss
ALIKE = 0.02  # final losses that differ by less than this share of them are a match

Record = dict[str, Any]


def final(record: Record) -> float:
    """The final loss; infinite where the run diverged."""
    return math.inf if record["final"] is None else float(record["final"])


def thinned(values: list[float] | list[int]) -> list[float]:
    """A curve of no more than POINTS points."""
    parts = np.array_split(np.asarray(values, dtype=float), min(POINTS, len(values)))
    return [float(f"{part.mean():.5g}") for part in parts]


def smooth(values: list[float], width: int) -> Any:
    return np.convolve(values, np.ones(width) / width, "valid")


def report(records: list[Record]) -> str:
    """The table and the sentences after it. The first record is Mechanic's, the second is of your learning rate."""
    learned, own, *others = records
    rows = []
    for record in [learned, *sorted([own, *others], key=lambda r: float(r["lr"]))]:
        rate = f"{record['lr']:g}"
        if record is learned:
            named = {"" if name == "default" else f"{name} ": s for name, s in learned["learned"].items()}
            rate = ", ".join(f"{name}{s:.2g}" for name, s in named.items()) + " (learned)"
        elif record is own:
            rate += " (yours)"
        reached = steps_to(record, own["final"])
        rows.append(
            [
                record["method"],
                rate,
                "diverged" if record["final"] is None else f"{record['final']:.4g}",
                f"{reached} of {record['steps']}" if reached else "–",
                f"{1000 * record['seconds_per_step']:.3g}",
                f"{record['state_bytes'] / 1e6:.3g}",
            ]
        )
    header = ["", "learning rate", "final loss", "steps to your final loss", "ms per step", "optimizer state, MB"]
    time_ratio = learned["seconds_per_step"] / own["seconds_per_step"]
    memory = (learned["state_bytes"] - own["state_bytes"]) / 1e6
    cost = f"Cost: a step took {time_ratio:.2f} times as long, with {memory:.3g} MB more optimizer state."
    return "\n".join([_table(header, rows), "", cost, "", verdict(records)])


def verdict(records: list[Record]) -> str:
    """One plain sentence, or two if the learned rate was off."""
    learned, own, *others = records
    best = min([own, *others], key=final)
    rate = _learned_rate(learned)
    if learned["final"] is None:
        if own["final"] is None and best["final"] is None:
            return "Nothing trained: Mechanic and every learning rate tried diverged."
        said = f"Mechanic diverged here, while {best['lr']:g} reaches {best['final']:.3g}."
        return f"{said} Please report it with this file."
    worth = _against_own(learned, own)
    of_grid = f"{best['lr']:g} reaches {best['final']:.3g}" if best["final"] is not None else "all diverged"
    rest = f" with a learned rate of {rate:.2g}" if rate is not None and not others else ""
    if others and best is own:
        rest = ", and yours was the best of the grid"
    elif others and _is_clearly_less(learned, best):
        rest = f", and no learning rate of the grid did as well ({of_grid})"
    elif others and _is_clearly_less(best, learned):
        link = "and" if worth.startswith("Mechanic lost") else "but"
        rest = f", {link} the grid found a better learning rate: {of_grid}"
    elif others:
        rest = f", and the best of the grid does no better ({of_grid})"
    sentence = f"{worth}{rest}."
    if others and rate is not None and _is_clearly_less(best, learned):
        sentence += _how_far_off(rate, best["lr"])
    if others and best["lr"] in (min(lrs := [r["lr"] for r in [own, *others]]), max(lrs)):
        sentence += " The best learning rate is at the edge of the grid, so there may be a better one."
    return sentence


def _against_own(learned: Record, own: Record) -> str:
    if own["final"] is None:
        return f"Your learning rate diverged, and Mechanic reached {learned['final']:.3g}"
    numbers = f"({learned['final']:.3g} against {own['final']:.3g})"
    if _is_clearly_less(learned, own):
        return f"Mechanic beat your learning rate {numbers}"
    if _is_clearly_less(own, learned):
        return f"Mechanic lost to your learning rate {numbers}"
    return f"Mechanic matched your learning rate {numbers}"


def _how_far_off(rate: float, best: float) -> str:
    if rate <= 0:
        return " Nothing was learned."
    factor = max(rate / best, best / rate)
    if factor < 2:
        return f" The learned rate, {rate:.2g}, was close to it all the same."
    return f" The learned rate, {rate:.2g}, was {factor:.2g} times too {'small' if rate < best else 'large'}."


def _is_clearly_less(one: Record, other: Record) -> bool:
    a, b = final(one), final(other)
    return a < b and (b == math.inf or b - a > ALIKE * max(abs(a), abs(b)))


def _learned_rate(learned: Record) -> float | None:
    """What was learned, if it is one number."""
    return float(next(iter(learned["learned"].values()))) if len(learned["learned"]) == 1 else None


def steps_to(record: Record, loss: float | None) -> int | None:
    """The first step by which the mean over a tenth of the steps was as low as ``loss``."""
    curve = record["curve"]
    width = max(1, round(TAIL * len(curve["train_loss"])))
    if loss is None or len(curve["train_loss"]) < width:
        return None
    means = smooth(curve["train_loss"], width)
    low = np.flatnonzero(means <= loss + 1e-4 * abs(loss))  # recorded with five digits
    return round(curve["step"][low[0] + width - 1]) if len(low) else None


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown, with columns that are as wide as their cells."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(cells[0]))]

    def lines() -> Iterator[str]:
        for row in cells:
            yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    first, *rest = lines()
    return "\n".join([first, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rest])
