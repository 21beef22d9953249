"""Mechanic on a training function of one's own: what the learned rate is, what it is worth, what it costs.

The function takes an optimizer factory and yields the loss of every step::

    def train(make_optimizer):
        model = ...
        optimizer = make_optimizer(model.parameters(), weight_decay=0.1)
        for batch in batches:
            ...
            optimizer.step()
            yield loss

It runs once with Mechanic around the base, once with the bare base at one's own lr, and on a grid if asked.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from tqdm import tqdm

from benchmarks.report.markdown import table
from benchmarks.suite.record import Run, versions
from benchmarks.suite.recordbook import RecordBook
from mechanic.torch import Mechanic

GRID = range(-2, 3)  # half decades around one's own lr; it grows until its best is not at the edge
FARTHEST = 8  # half decades: where even a growing grid ends
POINTS = 400  # of a recorded curve; longer ones are means
TAIL = 0.1  # share of the steps whose mean is the final loss

Train = Callable[[Callable[..., Optimizer]], Iterator[Any]]


@dataclass(frozen=True)
class Trial:
    """A training function, the optimizer it is used with, and its learning rate."""

    task: str
    train: Train
    base: type[Optimizer]
    lr: float

    @property
    def learned(self) -> Run:
        return Run(self.task, f"Mechanic({self.base.__name__})", 1.0, seed=0)

    @property
    def own(self) -> Run:
        return Run(self.task, self.base.__name__, self.lr, seed=0)

    def grid_run(self, index: int) -> Run:
        lr = float(f"{self.lr * 10 ** (index / 2):.3g}") if index else self.lr
        return Run(self.task, self.base.__name__, lr, seed=0)


def try_out(target: str, base: str, lr: float, *, grid: bool, out: Path) -> None:
    """Run what is not recorded in ``out``, print the table, and draw the picture beside it."""
    trial = _load(target, base, lr)
    book = RecordBook(out)
    if any(run.task == trial.task for run in book.records):
        print(f"what is recorded in {out} of this file is not run again; delete that folder to run it anew")

    def recorded(run: Run) -> dict[str, Any]:
        if run not in book.records:
            book.add(measure(trial, run, steps))
        return book.records[run]

    steps = None
    learned = recorded(trial.learned)
    steps = learned["steps"]
    own = recorded(trial.own)
    by_index = {0: own}
    wanted = set(GRID) if grid else set()
    while missing := sorted(wanted - set(by_index)):
        by_index |= {index: recorded(trial.grid_run(index)) for index in missing}
        best = min(by_index, key=lambda index: _final(by_index[index]))
        wanted |= {index for index in (best - 1, best + 1) if abs(index) <= FARTHEST}
    records = [learned, own, *(by_index[index] for index in sorted(by_index) if index)]
    print("\n" + report(trial, records))
    picture = out / f"{trial.task}.png"
    draw(trial, records, picture)
    print(f"\nDrawn to {picture}.")


def _load(target: str, base: str, lr: float) -> Trial:
    file, _, function = target.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not function:
        raise SystemExit(f"name a file and a function in it, as in your_file.py:train; got {target!r}")
    if not path.is_file():
        raise SystemExit(f"there is no file {file}")
    if not lr > 0:
        raise SystemExit(f"--lr is the learning rate that you train with, a positive number; got {lr}")
    sys.path.insert(0, str(path.parent.resolve()))  # as when it is run by itself
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not callable(train := getattr(module, function, None)):
        raise SystemExit(f"{file} has no function {function!r}")
    package, _, name = base.rpartition(".")
    try:
        base_class = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SystemExit(f"--base is the path of an optimizer class, as in torch.optim.AdamW; got {base!r}") from error
    version = hashlib.sha256(path.read_bytes()).hexdigest()[:8]  # an edited file is another task
    return Trial(f"{path.stem}-{function}-{version}", train, base_class, lr)


def measure(trial: Trial, run: Run, steps: int | None = None) -> dict[str, Any]:
    """Train once; the record of what happened."""
    made: list[Optimizer] = []

    def make_optimizer(params: Any, **options: Any) -> Optimizer:
        options.pop("lr", None)  # it is what is being tried
        base = trial.base(params, lr=run.lr, **options)
        made.append(Mechanic(base) if run == trial.learned else base)
        return made[-1]

    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - that of the user's code
    losses: list[float] = []
    scales: list[dict[str, float]] = []
    seconds: list[float] = []
    label = run.contender if run == trial.learned else f"{run.contender} at {run.lr:g}"
    with tqdm(_yields(trial.train, make_optimizer), total=steps, desc=label, unit="step") as bar:
        start = time.perf_counter()
        for loss in bar:
            seconds.append(time.perf_counter() - start)
            losses.append(_number(loss, len(losses) + 1))
            if not made:
                raise SystemExit("the function has not called the optimizer factory that it was given")
            if run == trial.learned:
                scales.append({name: s for optimizer in made for name, s in optimizer.scales().items()})
            bar.set_postfix_str(f"loss {losses[-1]:.4g}", refresh=False)
            if not math.isfinite(losses[-1]):
                break  # what has diverged does not come back
            start = time.perf_counter()
    if not losses:
        raise SystemExit("the function has yielded no loss")
    tail = losses[-max(1, round(TAIL * len(losses))) :]
    return {
        **vars(run),
        "steps": len(losses),
        "seconds": sum(seconds),
        "seconds_per_step": statistics.median(seconds),
        "state_bytes": sum(_state_bytes(optimizer) for optimizer in made),
        "final": statistics.mean(tail) if math.isfinite(losses[-1]) else None,
        "learned": {name: statistics.median(s[name] for s in scales[len(scales) // 2 :]) for name in _names(scales)},
        "curve": {
            "step": _thinned(list(range(1, len(losses) + 1))),
            "train_loss": _thinned(losses),
            **{f"scale {name}": _thinned([s.get(name, 0.0) for s in scales]) for name in _names(scales)},
        },
        "versions": versions(),
    }


def _yields(train: Train, make_optimizer: Callable[..., Optimizer]) -> Iterator[Any]:
    losses = train(make_optimizer)
    if not hasattr(losses, "__iter__"):
        raise SystemExit(f"the function has returned {losses!r}; it has to yield the loss of every step")
    return iter(losses)


def _number(loss: Any, step: int) -> float:
    try:
        return float(loss)
    except (TypeError, ValueError) as error:
        what = f"step {step} has yielded a {type(loss).__name__}"
        raise SystemExit(f"{what}; it has to yield the loss, a number or a tensor of one element") from error


def _names(scales: list[dict[str, float]]) -> list[str]:
    return list(scales[-1]) if scales else []


def _state_bytes(optimizer: Optimizer) -> int:
    tensors = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _thinned(values: list[float]) -> list[float]:
    parts = np.array_split(np.asarray(values, dtype=float), min(POINTS, len(values)))
    return [float(f"{part.mean():.5g}") for part in parts]


# The answer.


def _final(record: dict[str, Any]) -> float:
    return math.inf if record["final"] is None else record["final"]


def report(trial: Trial, records: list[dict[str, Any]]) -> str:
    learned, own, *others = records
    rows = []
    for record in [learned, *sorted([own, *others], key=lambda r: r["lr"])]:
        rate = f"{record['lr']:g}"
        if record is learned:
            named = {"" if name == "default" else f"{name} ": s for name, s in learned["learned"].items()}
            rate = ", ".join(f"{name}{s:.2g}" for name, s in named.items()) + " (learned)"
        elif record is own:
            rate += " (yours)"
        reached = steps_to(record, own["final"])
        rows.append(
            [
                record["contender"],
                rate,
                "diverged" if record["final"] is None else f"{record['final']:.4g}",
                f"{reached} of {record['steps']}" if reached else "–",
                f"{1000 * record['seconds_per_step']:.3g}",
                f"{record['state_bytes'] / 1e6:.3g}",
            ]
        )
    header = ["", "learning rate", "final loss", "steps to your final loss", "ms a step", "optimizer state, MB"]
    return table(header, rows) + "\n\n" + "\n".join(_sentences(trial, learned, own, others))


def _sentences(
    trial: Trial, learned: dict[str, Any], own: dict[str, Any], others: list[dict[str, Any]]
) -> Iterator[str]:
    if len(learned["learned"]) == 1:
        (rate,) = learned["learned"].values()
        yield f"Learned: {rate:.2g}, {rate / trial.lr:.3g} times your learning rate (the median over the second half)."
    if learned["final"] is None:
        yield "Worth: nothing here. The run with Mechanic diverged; please report it with this file."
    else:
        yours = "yours diverged" if own["final"] is None else f"{own['final']:.4g} with yours"
        yield f"Worth: a final loss of {learned['final']:.4g}; {yours}, from {own['curve']['train_loss'][0]:.3g}."
    if others:
        runs = [own, *others]
        best = min(runs, key=_final)
        beyond = " It is at the edge." if best["lr"] in (min(r["lr"] for r in runs), max(r["lr"] for r in runs)) else ""
        yield f"Best of the grid: {_final(best):.4g} at {best['lr']:g}, found in {len(runs)} runs.{beyond}"
    time_ratio = learned["seconds_per_step"] / own["seconds_per_step"]
    memory = learned["state_bytes"] - own["state_bytes"]
    yield f"Cost: {time_ratio:.2f} times the time of a step, and {memory / 1e6:.3g} MB more of optimizer state."
    yield "Times are medians of runs one after the other: on a busy machine they say little."


def steps_to(record: dict[str, Any], loss: float | None) -> int | None:
    """The first step by which the mean over a tenth of the steps was as low as ``loss``."""
    curve = record["curve"]
    width = max(1, round(TAIL * len(curve["train_loss"])))
    if loss is None or len(curve["train_loss"]) < width:
        return None
    means = _smooth(curve["train_loss"], width)
    low = np.flatnonzero(means <= loss * (1 + 1e-4))  # recorded with five digits
    return round(curve["step"][low[0] + width - 1]) if len(low) else None


def _smooth(values: list[float], width: int) -> Any:
    return np.convolve(values, np.ones(width) / width, "valid")


def draw(trial: Trial, records: list[dict[str, Any]], path: Path) -> None:
    """Losses and the learned scale over the steps, and, where there is a grid, the final loss over the lr."""
    from benchmarks.report.style import LOOK, STYLES, plt

    learned, own, *others = records
    ours, yours = ({**STYLES[name], "marker": None} for name in ("mechanic", "tuned"))
    grid = {"color": "#E69F00", "linestyle": "-."}
    with plt.rc_context(LOOK):
        panels = 3 if others else 2
        figure, axes = plt.subplots(1, panels, figsize=(3.6 * panels, 3.2))
        shown = [(own, f"{own['contender']} at {own['lr']:g}, yours", yours)]
        best = min([own, *others], key=_final)
        if best is not own:
            shown.append((best, f"at {best['lr']:g}, best of the grid", grid))
        shown.append((learned, learned["contender"], ours))
        for record, label, style in shown:
            losses = record["curve"]["train_loss"]
            width = max(1, len(losses) // 40)
            axes[0].plot(record["curve"]["step"][width - 1 :], _smooth(losses, width), label=label, lw=1.5, **style)
        axes[0].set(xlabel="step", ylabel="train loss", title="What it is worth")
        if all(loss > 0 for record, _, _ in shown for loss in record["curve"]["train_loss"]):
            axes[0].set_yscale("log")
        axes[0].legend()

        for index, name in enumerate(learned["learned"]):
            values = [value or np.nan for value in learned["curve"][f"scale {name}"]]
            style = {**ours, "linestyle": ("-", "--", ":", "-.")[index % 4]}
            axes[1].plot(
                learned["curve"]["step"], values, label=f"S{'' if name == 'default' else ', ' + name}", **style
            )
        axes[1].axhline(own["lr"], label="yours", lw=1.2, **yours)
        axes[1].set(xlabel="step", yscale="log", title="What is learned", ylabel="peak learning rate")
        axes[1].legend()

        if others:
            start = own["curve"]["train_loss"][0]
            by_lr = sorted([own, *others], key=lambda record: record["lr"])
            lrs = [record["lr"] for record in by_lr]
            finals = [start if r["final"] is None else min(start, r["final"]) for r in by_lr]
            axes[2].plot(lrs, finals, color="black", marker="o", markersize=4, lw=1, ls="--", label=own["contender"])
            if learned["final"] is not None:
                axes[2].axhline(learned["final"], label=learned["contender"], **ours)
                for rate in learned["learned"].values():
                    axes[2].plot(rate, learned["final"], color=ours["color"], marker="o", markersize=6)
            axes[2].set(
                xscale="log",
                yscale=axes[0].get_yscale(),
                xlabel="learning rate, passed or learned",
                ylabel="final loss",
                title="Against a grid",
            )
            axes[2].legend()
        figure.savefig(path, dpi=160)
        plt.close(figure)
