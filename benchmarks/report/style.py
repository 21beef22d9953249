"""The look of all figures: every contender has a colour and a mark of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's colours, which all eyes tell apart, and a dark violet and a dark red.
STYLES = {
    "tuned": {"color": "#000000", "linestyle": "--", "marker": "|"},
    "mechanic": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "mechanic-paper": {"color": "#56B4E9", "linestyle": "-.", "marker": "s"},
    "mechanic-pytorch": {"color": "#009E73", "linestyle": ":", "marker": "^"},
    "d-adaptation": {"color": "#D55E00", "linestyle": "-", "marker": "v"},
    "prodigy": {"color": "#CC79A7", "linestyle": "--", "marker": "D"},
    "dog": {"color": "#E69F00", "linestyle": "-.", "marker": "P"},
    "schedule-free": {"color": "#999999", "linestyle": ":", "marker": "X"},
    "prodigy-plus-schedule-free": {"color": "#332288", "linestyle": "--", "marker": "*"},
    "schedule-free-plus": {"color": "#882255", "linestyle": "-.", "marker": "h"},
}
LOOK = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "legend.frameon": False,
    "svg.hashsalt": "mechanic",
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",
}


def save(figure: Any, folder: Path, name: str) -> None:
    """As a vector graphic for the docs and as a picture for everywhere else."""
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    figure.savefig(folder / f"{name}.png", dpi=160)
    plt.close(figure)
