"""The picture of a trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from mechanic.cli.verdict import Record, final, smooth

# Okabe and Ito's colours, which all eyes tell apart.
OURS: dict[str, Any] = {"color": "#0072B2", "linestyle": "-"}
YOURS: dict[str, Any] = {"color": "#000000", "linestyle": "--"}
GRID: dict[str, Any] = {"color": "#E69F00", "linestyle": "-."}
LOOK: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "legend.frameon": False,
    "savefig.facecolor": "white",
}


def draw(records: list[Record], path: Path) -> None:
    """Losses and the learned rate over the steps, and, where there is a grid, the final loss over the lr."""
    learned, own, *others = records
    with mpl.rc_context(LOOK):
        panels = 3 if others else 2
        # Without pyplot, which would choose a window system.
        figure = Figure(figsize=(3.6 * panels, 3.2), layout="constrained")
        axes = figure.subplots(1, panels)
        _draw_losses(axes[0], learned, own, others)
        _draw_learned(axes[1], learned, own)
        if others:
            _draw_grid(axes[2], learned, [own, *others])
            axes[2].set_yscale(axes[0].get_yscale())
        figure.savefig(path, dpi=160)


def _draw_losses(axes: Any, learned: Record, own: Record, others: list[Record]) -> None:
    shown = [(own, f"{own['method']} at {own['lr']:g}, yours", YOURS)]
    best = min([own, *others], key=final)
    if best is not own:
        shown.append((best, f"at {best['lr']:g}, best of the grid", GRID))
    shown.append((learned, learned["method"], OURS))
    for record, label, style in shown:
        losses = record["curve"]["train_loss"]
        width = max(1, len(losses) // 40)
        axes.plot(record["curve"]["step"][width - 1 :], smooth(losses, width), label=label, lw=1.5, **style)
    axes.set(xlabel="step", ylabel="train loss", title="Loss")
    if all(loss > 0 for record, _, _ in shown for loss in record["curve"]["train_loss"]):
        axes.set_yscale("log")
    axes.legend()


def _draw_learned(axes: Any, learned: Record, own: Record) -> None:
    for index, name in enumerate(learned["learned"]):
        values = [value or np.nan for value in learned["curve"][f"scale {name}"]]
        label = "learned" if name == "default" else f"learned, {name}"
        style = {**OURS, "linestyle": ("-", "--", ":", "-.")[index % 4]}
        axes.plot(learned["curve"]["step"], values, label=label, **style)
    axes.axhline(own["lr"], label="yours", lw=1.2, **YOURS)
    axes.set(xlabel="step", yscale="log", title="Learning rate", ylabel="peak learning rate")
    axes.legend()


def _draw_grid(axes: Any, learned: Record, plain: list[Record]) -> None:
    start = plain[0]["curve"]["train_loss"][0]
    by_lr = sorted(plain, key=lambda record: float(record["lr"]))
    finals = [min(start, final(record)) for record in by_lr]  # what diverged is drawn where it began
    axes.plot(
        [r["lr"] for r in by_lr], finals, color="black", marker="o", ms=4, lw=1, ls="--", label=plain[0]["method"]
    )
    if learned["final"] is not None:
        axes.axhline(learned["final"], label=learned["method"], **OURS)
        for rate in learned["learned"].values():
            axes.plot(rate, learned["final"], color=OURS["color"], marker="o", ms=6)
    axes.set(xscale="log", xlabel="learning rate, passed or learned", ylabel="final loss", title="Against a grid")
    axes.legend()
