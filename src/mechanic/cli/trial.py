"""``mechanic try``: Mechanic beside your learning rate, on a training function of your own.

The function takes an optimizer factory and yields the loss of every step::

    def train(make_optimizer):
        model = ...
        optimizer = make_optimizer(model.parameters(), weight_decay=0.1)
        for batch in batches:
            ...
            optimizer.step()
            yield loss

It runs once with Mechanic around the base optimizer, once with the bare one at your lr, and on a grid if asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import json
import math
import random
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

from mechanic.cli.verdict import Record, final, report, thinned
from mechanic.torch import Mechanic

GRID = range(-2, 3)  # half decades around your lr; it grows until its best is not at the edge
FARTHEST = 8  # half decades: where even a growing grid ends
TAIL = 0.1  # share of the steps whose mean is the final loss

Train = Callable[[Callable[..., Optimizer]], Iterator[Any]]


@dataclass(frozen=True)
class Trial:
    """A training function, the optimizer it is used with, and its learning rate."""

    task: str
    train: Train
    base: type[Optimizer]
    lr: float
    steps: int | None = None

    def grid_lr(self, index: int) -> float:
        return float(f"{self.lr * 10 ** (index / 2):.3g}") if index else self.lr


class Book:
    """The records of a trial on disk, one line per run; what is there is not run again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[tuple[str, float], Record] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a run may have been killed while it wrote
        for record in map(json.loads, whole.splitlines()):
            self._records[record["method"], record["lr"]] = record
        if whole != text:
            path.write_text(whole, encoding="utf-8")

    def __len__(self) -> int:
        return len(self._records)

    def get(self, method: str, lr: float, make: Callable[[], Record]) -> Record:
        if (method, lr) not in self._records:
            record = self._records[method, lr] = make()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
        return self._records[method, lr]


def try_out(
    target: str, base: str, lr: float, *, grid: bool = False, steps: int | None = None, out: str | Path = "trial"
) -> None:
    """Run what is not recorded in ``out``, print the table and the verdict, and draw the picture beside it."""
    trial = _load(target, base, lr, steps)
    folder = Path(out)
    book = Book(folder / f"{trial.task}.jsonl")
    if len(book):
        print(f"Results in {folder} are used again. Delete that folder to start afresh.")
    runs = _Runs(2 + (len(GRID) - 1 if grid else 0), steps)

    def run(lr: float, *, learn: bool = False) -> Record:
        method = f"Mechanic({trial.base.__name__})" if learn else trial.base.__name__
        record = book.get(method, lr, lambda: measure(trial, lr, runs, learn=learn))
        runs.next(record["steps"])
        return record

    learned, own = run(1.0, learn=True), run(trial.lr)
    by_index = {0: own}
    wanted = set(GRID) if grid else set()
    while missing := sorted(wanted - set(by_index)):
        runs.total = max(runs.total, runs.done + len(missing))
        by_index |= {index: run(trial.grid_lr(index)) for index in missing}
        best = min(by_index, key=lambda index: final(by_index[index]))
        wanted |= {index for index in (best - 1, best + 1) if abs(index) <= FARTHEST}
    records = [learned, own, *(by_index[index] for index in sorted(by_index) if index)]
    print("\n" + report(records))
    _draw(records, folder / f"{trial.task}.png")


def _draw(records: list[Record], path: Path) -> None:
    try:
        from mechanic.cli.picture import draw
    except ModuleNotFoundError as error:
        print(f'\nNo picture: {error.name} is missing; pip install "mechanic[cli]"')
        return
    draw(records, path)
    print(f"\nPicture: {path}")


def _load(target: str, base: str, lr: float, steps: int | None) -> Trial:
    file, _, function = target.rpartition(":")
    path = Path(file)
    if not file.endswith(".py") or not function:
        raise SystemExit(f"name a file and a function in it, as in your_file.py:train; got {target!r}")
    if not path.is_file():
        raise SystemExit(f"there is no file {file}")
    if not lr > 0:
        raise SystemExit(f"--lr is the learning rate that you train with, a positive number; got {lr}")
    package, _, name = base.rpartition(".")
    sys.path.insert(0, str(path.parent.resolve()))  # as when it is run by itself
    try:
        base_class = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SystemExit(f"--base is the path of an optimizer class, as in torch.optim.AdamW; got {base!r}") from error
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not callable(train := getattr(module, function, None)):
        raise SystemExit(f"{file} has no function {function!r}")
    version = hashlib.sha256(path.read_bytes() + f"{base}{steps or ''}".encode()).hexdigest()[:8]
    return Trial(f"{path.stem}-{function}-{version}", train, base_class, lr, steps)


class _Runs:
    """How many runs there are, and how many steps each: all have as many as the first."""

    def __init__(self, total: int, steps: int | None) -> None:
        self.total, self.done, self._steps = total, 0, steps

    def next(self, steps: int) -> None:
        self.done += 1
        self._steps = max(steps, self._steps or 0)  # one that diverged had fewer

    def bar(self, losses: Iterator[Any], label: str) -> Any:
        label = f"run {self.done + 1} of {self.total}, {label}"
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            print(label, file=sys.stderr)
            return contextlib.nullcontext(losses)
        return tqdm(losses, total=self._steps, desc=label, unit="step")


def measure(trial: Trial, rate: float, runs: _Runs, *, learn: bool) -> Record:
    """Train once; the record of what happened."""
    made: list[Any] = []

    def make_optimizer(params: Any, lr: float | None = None, **options: Any) -> Optimizer:
        # The learning rate is what is being tried. Groups keep their ratios to it.
        base = trial.base(_at_rate(params, rate / (lr or trial.lr)), **{**options, "lr": rate})
        made.append(Mechanic(base) if learn else base)
        return made[-1]  # type: ignore[no-any-return]

    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - that of the user's code
    losses: list[float] = []
    scales: list[dict[str, float]] = []
    seconds: list[float] = []
    label = f"Mechanic({trial.base.__name__})" if learn else f"{trial.base.__name__} at {rate:g}"
    yielded = itertools.islice(_yields(trial.train, make_optimizer), trial.steps)
    with runs.bar(yielded, label) as bar:
        start = time.perf_counter()
        for loss in bar:
            seconds.append(time.perf_counter() - start)
            losses.append(_number(loss, len(losses) + 1))
            if not made:
                raise SystemExit("the function has not called the optimizer factory that it was given")
            if learn:
                scales.append(_by_tuner([optimizer.scales() for optimizer in made]))
            if not math.isfinite(losses[-1]):
                break  # what has diverged does not come back
            start = time.perf_counter()
    if not losses:
        raise SystemExit("the function has yielded no loss")
    tail = losses[-max(1, round(TAIL * len(losses))) :]
    names = list(scales[-1]) if scales else []
    return {
        "method": f"Mechanic({trial.base.__name__})" if learn else trial.base.__name__,
        "lr": rate,
        "steps": len(losses),
        "seconds": sum(seconds),
        "seconds_per_step": statistics.median(seconds),
        "state_bytes": sum(_state_bytes(optimizer) for optimizer in made),
        "final": statistics.mean(tail) if math.isfinite(losses[-1]) else None,
        "learned": _by_tuner([optimizer.learned_rates() for optimizer in made]) if learn else {},
        "curve": {
            "step": thinned(list(range(1, len(losses) + 1))),
            "train_loss": thinned(losses),
            **{f"scale {name}": thinned([s.get(name, 0.0) for s in scales]) for name in names},
        },
    }


def _at_rate(params: Any, factor: float) -> Any:
    """Parameters, or groups of them with their learning rates times a factor."""
    if isinstance(params, torch.Tensor):
        return params
    given = list(params)
    return [{**g, "lr": factor * g["lr"]} if isinstance(g, dict) and g.get("lr") is not None else g for g in given]


def _by_tuner(by_optimizer: list[dict[str, float]]) -> dict[str, float]:
    """By the names of the tuners; of several optimizers, each tuner with their number."""
    if len(by_optimizer) == 1:
        return by_optimizer[0]
    return {f"{number} {name}": s for number, each in enumerate(by_optimizer) for name, s in each.items()}


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


def _state_bytes(optimizer: Optimizer) -> int:
    tensors = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
