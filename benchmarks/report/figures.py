"""The figures of the pages on results, on the contest and on Muon."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contest import score
from benchmarks.contest.methods import METHODS
from benchmarks.report.muon import FAMILIES_OF_WIDTHS, ROLES_OF_WIDTHS, best_pair, plane, scales_by_width
from benchmarks.report.results import FAMILIES, Results, members
from benchmarks.report.style import LOOK, STYLES, plt, save
from benchmarks.report.verdict import CLOCKS, SLACKS, Judgement
from benchmarks.suite.record import final
from benchmarks.suite.tasks import MUON_WIDTHS

LABELS = {"tuned": "tuned learning rate", **FAMILIES}
SHOWN = ["mlp-fashion", "cnn-mnist", "resnet-cifar10", "gpt-shakespeare", "bert-mlm", "lstm-tatoeba"]
SHOWN += ["bert-banking77", "vit-cifar10", "convex-letter"]


def draw_all(results: Results, judgement: Judgement, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {name: partial(draw, results) for name, draw in FIGURES.items()} | {"contest": partial(contest, judgement)}
    for name, draw in drawn.items():
        with plt.rc_context(LOOK):
            figure = draw()
            if figure is not None:
                save(figure, folder, name)


def against_lr(results: Results) -> Any:
    """The baseline's U and our flat line."""
    shown = [("mlp-fashion", "adamw"), ("gpt-shakespeare", "adamw"), ("mlp-fashion", "sgd"), ("gpt-shakespeare", "sgd")]
    shown = [(task, base) for task, base in shown if results.runs(task, f"flat {base}")][:2]
    if not shown:
        return None
    figure, panels = plt.subplots(1, len(shown), figsize=(7.4, 2.9), squeeze=False)
    for axis, (task, base) in zip(panels[0], shown, strict=True):
        for contender, style in ((base, "tuned"), (f"flat {base}", "mechanic")):
            by_lr = {lr: final(records[0]) for lr, records in sorted(results.runs(task, contender).items())}
            label = {"adamw": "AdamW", "sgd": "SGD"}[base]
            label = label if style == "tuned" else f"Mechanic({label})"
            axis.plot(
                list(by_lr), list(by_lr.values()), label=label, **{**STYLES[style], "marker": "o"}, markersize=3.5
            )
        start = results.initial(task, "train_loss")
        axis.axhline(start, color="0.7", linewidth=0.8)
        axis.text(1e-6, start, " untrained", color="0.45", va="bottom", fontsize=8)
        axis.set_xscale("log")
        axis.set_xlim(5e-7, 2e6)
        axis.set_ylim(0, 1.25 * start)
        axis.set_title(TITLES.get(task, task))
        axis.set_xlabel("learning rate passed")
    panels[0][0].set_ylabel("final train loss")
    panels[0][0].legend(loc="center right")
    return figure


TITLES = {"mlp-fashion": "MLP on Fashion-MNIST", "gpt-shakespeare": "small GPT on Shakespeare"}


def curves(results: Results) -> Any:
    """Train loss over the steps, AdamW's family."""
    contenders = [
        ("tuned", None),
        ("mechanic", "mechanic adamw"),
        ("mechanic-paper", "mechanic-paper adamw"),
        ("mechanic-pytorch", "mechanic-pytorch adamw"),
        ("d-adaptation", "d-adaptation adamw"),
        ("prodigy", "prodigy"),
        ("prodigy-plus-schedule-free", "prodigy-plus-schedule-free"),
    ]

    def draw(axis: Any, task: str) -> None:
        best = results.tuned(task, "adamw", "train_loss")
        for style, contender in contenders:
            if contender is None:
                records = results.runs(task, "adamw")[best[0]] if best else []
            else:
                records = results.records_of(task, contender)
            _plot_mean(axis, records, label=LABELS[style], **{**STYLES[style], "marker": None})
        axis.set_yscale("log")
        axis.set_xlabel("step")

    return _panels(results, draw, "train loss")


def _plot_mean(axis: Any, records: list[dict[str, Any]], **look: Any) -> None:
    """The mean train loss of the runs that did not diverge."""
    whole = [record for record in records if math.isfinite(final(record))]
    if whole:
        mean = np.mean([record["curve"]["train_loss"] for record in whole], 0)
        axis.plot(whole[0]["evaluated"], mean, linewidth=1.4, **look)


def scales(results: Results) -> Any:
    """S over the steps, AdamW; the tuned learning rate as a level."""

    def draw(axis: Any, task: str) -> None:
        for style in ("mechanic", "mechanic-paper"):
            records = results.records_of(task, f"{style} adamw")
            for index, record in enumerate(records):
                values = [value or np.nan for value in record["curve"]["scale"]]
                look = {**STYLES[style], "marker": None, "linewidth": 1, "label": None if index else LABELS[style]}
                axis.plot(record["evaluated"][: len(values)], values, **look)
        if best := results.tuned(task, "adamw", "train_loss"):
            axis.axhline(best[0], label=LABELS["tuned"], color="0.2", linestyle="--", linewidth=1)
        axis.set_yscale("log")
        axis.set_xlabel("step")

    return _panels(results, draw, "learned scale S")


def _panels(results: Results, draw: Callable[[Any, str], None], ylabel: str) -> Any:
    tasks = [task for task in SHOWN if results.runs(task, "mechanic adamw")]
    if not tasks:
        return None
    rows = (len(tasks) + 2) // 3
    figure, axes = plt.subplots(rows, 3, figsize=(7.6, 2.1 * rows + 0.5), squeeze=False)
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    for axis, task in zip(axes.flat, tasks, strict=False):
        draw(axis, task)
        axis.set_title(task)
    for row in axes:
        row[0].set_ylabel(ylabel)
    handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3)
    return figure


def rho_per_task(results: Results) -> Any:
    """One line per task; a mark per contender, mean over its bases, the spread over bases and seeds behind it."""
    tasks = [task for task in results.tasks()[::-1] if results.rho(task, "mechanic adamw", "adamw")]
    if not tasks:
        return None
    families = [name for name in STYLES if name != "tuned"]
    figure, axis = plt.subplots(figsize=(7.6, 0.32 * len(tasks) + 1.4))
    for offset, name in enumerate(families):
        for row, task in enumerate(tasks):
            seeds: list[float] = []
            for base, contender in members(name).items():
                seeds += results.rho(task, contender, base)
            if not seeds:
                continue
            height = row + 0.36 * (1 - 2 * offset / (len(families) - 1))
            style = STYLES[name]
            axis.plot([min(seeds), max(seeds)], [height, height], color=style["color"], linewidth=0.8, alpha=0.5)
            label = LABELS[name] if row == 0 else None
            axis.plot(statistics.mean(seeds), height, style["marker"], color=style["color"], markersize=4, label=label)
    axis.axvline(0, color="black", linewidth=0.8)
    for row in range(0, len(tasks), 2):
        axis.axhspan(row - 0.5, row + 0.5, color="0.96", zorder=0)
    axis.set_xscale("symlog", linthresh=0.02, linscale=0.8)
    ticks = [-0.1, -0.01, 0, 0.01, 0.1, 1]
    axis.set_xticks(ticks, [f"{100 * tick:g}" for tick in ticks])
    axis.set_yticks(range(len(tasks)), tasks)
    axis.set_ylim(-0.6, len(tasks) - 0.4)
    axis.set_xlabel("ρ in %: 0 = tuned learning rate, 100 = learned nothing; linear within ±2")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def profiles(results: Results) -> Any:
    """Which share of all tasks and bases a contender brings within a distance of the tuned base."""
    figure, axis = plt.subplots(figsize=(5.6, 3.4))
    levels = np.concatenate([[0], np.logspace(-3, 0, 200)])
    for name, style in STYLES.items():
        if name == "tuned" or not (found := list(results.family(name).values())):
            continue
        shares = [np.mean([value <= level for value in found]) for level in levels]
        look = {**style, "marker": None}
        axis.plot(levels, shares, label=LABELS[name], linewidth=1.6, drawstyle="steps-post", **look)
    axis.set_xscale("symlog", linthresh=1e-3, linscale=0.4)
    ticks = [0, 1e-3, 1e-2, 1e-1, 1]
    axis.set_xticks(ticks, [f"{100 * tick:g}" for tick in ticks])
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("ρ at most, in %")
    axis.set_ylabel("share of tasks and bases")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def batch_and_width(results: Results) -> Any:
    """The paper's figure: the learned scale against batch size and model size."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.8))
    for axis, kind, label in zip(axes, ("batch", "width"), ("batch size", "width of the model"), strict=True):
        prefix = f"bert-mlm-{kind}"
        ours = [task for task, name in results.pairs() if name == "mechanic adamw" and task.startswith(prefix)]
        sizes = sorted(int(task.removeprefix(prefix)) for task in ours)
        if not sizes:
            return None
        tuned, learned = [], []
        for size in sizes:
            records = results.records_of(f"{prefix}{size}", "mechanic adamw")
            learned.append([statistics.median(r["curve"]["scale"][3:]) for r in records])
            tuned.append(_best_lr(results, f"{prefix}{size}"))
        style = STYLES["mechanic"]
        axis.plot(sizes, [np.mean(values) for values in learned], label="Mechanic: median S", **style, markersize=4)
        axis.plot(sizes, tuned, label="best of the grid", color="black", linestyle="--", marker="x", markersize=5)
        axis.set(xscale="log", yscale="log", xlabel=label, xticks=sizes, xticklabels=sizes)
        axis.minorticks_off()
    axes[0].set_ylabel("learning rate")
    axes[0].legend()
    return figure


def _best_lr(results: Results, task: str) -> float:
    tuned = results.tuned(task, "adamw", "train_loss")
    return tuned[0] if tuned else np.nan


def muon_widths(results: Results) -> Any:
    """The scale of every role against the width of the model, and how it would change by muP's rules for Adam."""
    families = {family: found for family in FAMILIES_OF_WIDTHS if (found := scales_by_width(results, family))}
    if not families:
        return None
    figure, axes = plt.subplots(1, len(families), figsize=(7.4, 2.9), sharey=True, squeeze=False)
    for axis, (family, by_role) in zip(axes[0], families.items(), strict=True):
        for role, style in zip(ROLES_OF_WIDTHS, STYLES.values(), strict=False):
            if by_width := by_role.get(role):
                axis.plot(
                    *zip(*by_width.items(), strict=True), label=role, color=style["color"], marker=style["marker"]
                )
        widths = list(by_role["matrix"])
        middle = statistics.geometric_mean(by_role["matrix"].values())
        slope = [middle * statistics.geometric_mean(widths) / width for width in widths]
        axis.plot(widths, slope, label="1 / width", color="0.6", linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel="width", xticks=widths, xticklabels=widths)
        axis.set_title(family.replace("-width{}", "").replace("-layers", ", layers: "))
        axis.minorticks_off()
    axes[0][0].set_ylabel("S in the middle of training")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def muon_curves(results: Results) -> Any:
    """Train loss over the steps of GPTs of two layers, with Muon and with AdamW: tuned, and ours."""
    tasks = [task.name for task in MUON_WIDTHS if task.name.endswith("layers2") and best_pair(results, task.name)]
    if not tasks:
        return None
    figure, axes = plt.subplots(1, len(tasks), figsize=(7.6, 2.9), sharey=True, squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        tuned = plane(results, task)[best_pair(results, task)[0]]
        lines = [
            (tuned, "Muon, tuned", "tuned", "--"),
            (results.records_of(task, "mechanic muon / one"), "MechanicMuon", "mechanic", "-"),
        ]
        if adamw := results.tuned(task, "adamw", "train_loss"):
            lines += [
                (results.runs(task, "adamw")[adamw[0]], "AdamW, tuned", "tuned", ":"),
                (results.records_of(task, "mechanic adamw"), "Mechanic with AdamW", "mechanic", ":"),
            ]
        for records, label, style, line in lines:
            _plot_mean(axis, records, label=label, **{**STYLES[style], "marker": None, "linestyle": line})
        width = task.removeprefix("gpt-shakespeare-width").removesuffix("-layers2")
        axis.set(title=f"width {width}", xlabel="step")
    axes[0][0].set_ylabel("train loss")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def contest(judgement: Judgement) -> Any:
    """AlgoPerf's performance profiles: the share of tasks and horizons on which a method is within τ of the fastest."""
    if not (over := judgement.horizons()):
        return None
    figure, axes = plt.subplots(1, len(CLOCKS), figsize=(7.6, 3.4), sharey=True)
    levels = np.linspace(1, score.FARTHEST, 301)
    for axis, (clock, kind) in zip(axes, CLOCKS.items(), strict=True):
        for method, ratios in judgement.ratios(over, SLACKS[0], clock).items():
            look = {**STYLES_OF_THE_CONTEST[method], "marker": None}
            label = METHODS[method].label
            axis.plot(levels, score.profile(ratios, levels), label=label, drawstyle="steps-post", **look)
        axis.set(xlabel=f"τ: {kind} as a multiple of the fastest's", ylim=(0, 1), xlim=(1, score.FARTHEST))
    axes[0].set_ylabel(f"share of tasks at the target, + {SLACKS[0]:.0%}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


STYLES_OF_THE_CONTEST = {**STYLES, "adamw": STYLES["tuned"], "nadamw": {"color": "#117733", "linestyle": "-."}}

FIGURES = {
    "muon-curves": muon_curves,
    "muon-widths": muon_widths,
    "against-lr": against_lr,
    "curves": curves,
    "scales": scales,
    "rho": rho_per_task,
    "profiles": profiles,
    "batch-and-width": batch_and_width,
}
