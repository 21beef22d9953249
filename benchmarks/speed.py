"""What Mechanic costs over the bare base: ``python -m benchmarks.speed`` measures, ``--report`` only reads.

Times are CPU seconds of one thread, which other work on the machine disturbs less than the clock's, of contender and
reference by turns, as ratios of medians. Every cell has a process of its own, and every figure of memory too.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from mechanic.torch import Mechanic, compiled

RECORDS = Path(__file__).parent / "records" / "speed" / "speed.jsonl"
Build = Callable[[Iterable[Tensor]], Any]


class CompiledBase:
    """A bare base whose rule is compiled as ours is: what one graph with Mechanic is held against."""

    def __init__(self, base: Any) -> None:
        self.base = base
        for group in base.param_groups:
            group["mechanic_unit"] = 1.0

    @torch.no_grad()
    def step(self) -> None:
        for group in self.base.param_groups:
            rule = compiled.rule_of(self.base, group)
            tensors, numbers = rule.read(self.base, group)
            scalars = torch.tensor(numbers[0]).unbind()
            lists = [[p.data for p in group["params"]], [p.grad for p in group["params"]], *tensors]
            kernel = _bare_adam if rule.kernel is compiled._whole_adam else _bare_momentum
            compiled._run(kernel, lists, (0, *range(2, len(lists))), *scalars)


def _bare_adam(x: Tensor, g: Tensor, m: Tensor, v: Tensor, *numbers: Tensor) -> None:
    u, new_m, new_v = compiled._adam(x, g, m, v, *numbers)
    x.copy_(x + u)
    m.copy_(new_m)
    v.copy_(new_v)


def _bare_momentum(x: Tensor, g: Tensor, buffer: Tensor, *numbers: Tensor) -> None:
    u, new_buffer = compiled._momentum(x, g, buffer, *numbers)
    x.copy_(x + u)
    buffer.copy_(new_buffer)


def _opaque(base: Any) -> Any:
    """A base that somebody watches is lent copies, whatever is known of it."""
    base.register_step_post_hook(lambda *_: None)
    return base


class Around(Mechanic):
    """Compiled around its base even where the two could be one."""

    def _compiles_whole(self, buckets: list[Any]) -> bool:
        super()._compiles_whole(buckets)
        return False


def _peer(name: str) -> Build:
    def build(params: Iterable[Tensor]) -> Any:
        if name == "mechanic-pytorch AdamW":
            from mechanic_pytorch import mechanize

            return mechanize(AdamW)(params, lr=1.0, fused=True)
        if name == "mechanic-pytorch SGD":
            from mechanic_pytorch import mechanize

            return mechanize(SGD)(params, lr=1.0, momentum=0.9, fused=True)
        if name == "D-Adaptation":
            from dadaptation import DAdaptAdam

            return DAdaptAdam(params, lr=1.0, weight_decay=0.01, decouple=True)
        if name == "Prodigy":
            from prodigyopt import Prodigy

            return Prodigy(params, lr=1.0, weight_decay=0.01)
        from schedulefree import AdamWScheduleFree

        optimizer = AdamWScheduleFree(params, lr=0.0025)
        optimizer.train()
        return optimizer

    return build


@dataclass(frozen=True)
class Contender:
    build: Build
    against: str = ""  # the name of a bare base; empty for those themselves
    limit: float | None = None  # what the ratio should stay below, at 50M
    words: str = ""  # read and written per parameter, by theory, of contender and reference


FUSED: dict[str, Any] = {"lr": 1e-3, "fused": True}
MOMENTUM: dict[str, Any] = {**FUSED, "momentum": 0.9}
CONTENDERS = {
    "AdamW fused": Contender(lambda p: AdamW(p, **FUSED)),
    "AdamW foreach": Contender(lambda p: AdamW(p, lr=1e-3, foreach=True)),
    "SGD momentum": Contender(lambda p: SGD(p, **MOMENTUM)),
    "AdamW compiled": Contender(lambda p: CompiledBase(AdamW(p, **FUSED))),
    "SGD momentum compiled": Contender(lambda p: CompiledBase(SGD(p, **MOMENTUM))),
    "Mechanic(AdamW)": Contender(lambda p: Mechanic(AdamW(p, **FUSED)), "AdamW fused", 4.5, "17 / 7"),
    "Mechanic(AdamW, weight_decay=0)": Contender(
        lambda p: Mechanic(AdamW(p, weight_decay=0.0, **FUSED)), "AdamW fused", 3.4, "16 / 7"
    ),
    "Mechanic(AdamW), on copies": Contender(
        lambda p: Mechanic(_opaque(AdamW(p, **FUSED))), "AdamW fused", 4.5, "17 / 7"
    ),
    "Mechanic(AdamW foreach)": Contender(lambda p: Mechanic(AdamW(p, lr=1e-3, foreach=True)), "AdamW foreach", 2.0),
    "Mechanic(SGD)": Contender(lambda p: Mechanic(SGD(p, **MOMENTUM)), "SGD momentum", 3.1, "14 / 5"),
    "Mechanic(SGD), on copies": Contender(
        lambda p: Mechanic(_opaque(SGD(p, **MOMENTUM))), "SGD momentum", 4.0, "15 / 5"
    ),
    "compiled around AdamW": Contender(lambda p: Around(AdamW(p, **FUSED), compile=True), "AdamW fused", 2.8, "17 / 7"),
    "compiled around AdamW, on copies": Contender(
        lambda p: Mechanic(_opaque(AdamW(p, **FUSED)), compile=True), "AdamW fused", 2.8, "17 / 7"
    ),
    "AdamW in one graph": Contender(
        lambda p: Mechanic(AdamW(p, **FUSED), compile=True), "AdamW compiled", 2.0, "12 / 7"
    ),
    "SGD in one graph": Contender(
        lambda p: Mechanic(SGD(p, **MOMENTUM), compile=True), "SGD momentum compiled", 2.4, "10 / 5"
    ),
    "AdamW in one graph, over fused": Contender(
        lambda p: Mechanic(AdamW(p, **FUSED), compile=True), "AdamW fused", None, "12 / 7"
    ),
    "mechanic-pytorch AdamW": Contender(_peer("mechanic-pytorch AdamW"), "AdamW fused"),
    "mechanic-pytorch SGD": Contender(_peer("mechanic-pytorch SGD"), "SGD momentum"),
    "D-Adaptation": Contender(_peer("D-Adaptation"), "AdamW foreach"),
    "Prodigy": Contender(_peer("Prodigy"), "AdamW foreach"),
    "Schedule-Free": Contender(_peer("Schedule-Free"), "AdamW foreach"),
}
OURS = [name for name in CONTENDERS if name.startswith(("Mechanic", "compiled", "AdamW in", "SGD in"))]
PEERS = [name for name in CONTENDERS if CONTENDERS[name].against and name not in OURS]
MANY = ["Mechanic(AdamW)", "Mechanic(AdamW foreach)", "Mechanic(SGD)", "AdamW in one graph, over fused", *PEERS]
CELLS: dict[str, tuple[int, int, list[str]]] = {  # tensors, elements of each, contenders
    "50M": (50, 1_000_000, [*OURS, *PEERS]),
    "1M in 200": (200, 5_000, [*OURS, *PEERS]),
    "200M": (50, 4_000_000, ["Mechanic(AdamW)", "AdamW in one graph", "AdamW in one graph, over fused"]),
    **{f"2M in {n}": (n, 2_000_000 // n, MANY) for n in (1, 10, 100, 1_000, 10_000)},
}
TRAINED = ["AdamW fused", "Mechanic(AdamW)", "AdamW in one graph", "mechanic-pytorch AdamW", "D-Adaptation", "Prodigy"]
REMEMBERED = ["AdamW fused", "AdamW foreach", "Mechanic(AdamW)", "Mechanic(AdamW), on copies", "AdamW in one graph"]
REMEMBERED += ["mechanic-pytorch AdamW", "D-Adaptation", "Prodigy", "Schedule-Free"]


def _with_gradients(tensors: int, elements: int) -> list[Tensor]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(0.02 * torch.randn(elements)) for _ in range(tensors)]
    for p in params:
        p.grad = 0.01 * torch.randn(elements)
    return params


def _timed(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def measure_steps(cell: str, rounds: int) -> None:
    tensors, elements, names = CELLS[cell]
    for name in names:
        contender = CONTENDERS[name]
        pair = [c.build(_with_gradients(tensors, elements)) for c in (CONTENDERS[contender.against], contender)]
        times: list[list[float]] = [[], []]
        for number in range(rounds + 2):  # the first two fill state and compile
            for optimizer, spent in zip(pair, times, strict=True):
                seconds = _timed(optimizer.step)
                if number >= 2:
                    spent.append(1e3 * seconds)
        del pair, optimizer
        bare, ours = (statistics.median(spent) for spent in times)
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        _record(part="step", cell=cell, contender=name, against=contender.against, ms=ours, bare_ms=bare, ratio=ratio)


def measure_training(rounds: int) -> None:
    """Every contender trains a model of its own, by turns; ratios are of steps of the same turn."""
    from benchmarks.models import GPT

    tokens = torch.randint(65, (8, 129), generator=torch.Generator().manual_seed(0))
    loops: dict[str, Callable[[], None]] = {}
    for name in TRAINED:
        torch.manual_seed(0)
        model = GPT(vocabulary=65, length=128, width=320, layers=8, heads=8, dropout=0.0)
        loops[name] = functools.partial(_train_once, model, CONTENDERS[name].build(model.parameters()), tokens)
    cell = f"GPT of {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M, 8 x 128"
    times: dict[str, list[float]] = {name: [] for name in TRAINED}
    for number in range(3 * rounds + 2):  # they differ by little, so more of them
        for name, loop in loops.items():
            seconds = _timed(loop)
            if number >= 2:
                times[name].append(1e3 * seconds)
    bare = times["AdamW fused"]
    for name in TRAINED[1:]:
        ratio = statistics.median(own / base for own, base in zip(times[name], bare, strict=True))
        ms, bare_ms = statistics.median(times[name]), statistics.median(bare)
        _record(part="training", cell=cell, contender=name, against="AdamW fused", ms=ms, bare_ms=bare_ms, ratio=ratio)


def _train_once(model: torch.nn.Module, optimizer: Any, tokens: Tensor) -> None:
    optimizer.zero_grad()
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()


def measure_memory(name: str) -> None:
    """Bytes per parameter beyond parameters and gradients: kept between steps, and passing during one."""

    def resident(key: str) -> int:
        ctypes.CDLL(None).malloc_trim(0)  # what has been freed is nobody's
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    def touch(optimizer: Any) -> None:
        for _ in range(3):
            optimizer.step()

    touch(CONTENDERS[name].build(_with_gradients(2, 300_000)))  # what is loaded or compiled at the first step
    params = _with_gradients(20, 1_000_000)
    before = resident("VmRSS")
    optimizer = CONTENDERS[name].build(params)
    touch(optimizer)
    kept = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    optimizer.step()
    elements = sum(p.numel() for p in params)
    _record(
        part="memory",
        cell="20M",
        contender=name,
        kept=(kept - before) / elements,
        passing=(resident("VmHWM") - kept) / elements,
    )


def measure_bandwidth() -> None:
    a, b = (torch.ones(50_000_000) for _ in range(2))
    runs = {"x += d": (3, lambda: a.add_(b)), "<x, x>": (1, lambda: torch.dot(a, a)), "clone": (2, lambda: a.clone())}
    for name, (words, run) in runs.items():
        seconds = statistics.median(_timed(run) for _ in range(9))
        _record(part="bandwidth", cell="50M", contender=name, gigabytes_per_second=words * a.nbytes / seconds / 1e9)


def _record(**figures: Any) -> None:
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cpu": platform.machine()}
    line = json.dumps({**rounded, **about}, separators=(",", ":"))
    print(line, flush=True)
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    with open(RECORDS, "a", encoding="utf-8") as file:
        file.write(line + "\n")


# Reading what was measured: the last line of a cell and contender counts.


def read() -> dict[tuple[str, str, str], dict[str, Any]]:
    records = {}
    for line in RECORDS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        records[record["part"], record["cell"], record["contender"]] = record
    return records


def tables(records: dict[tuple[str, str, str], dict[str, Any]]) -> str:
    cells = [cell for cell in CELLS if any(key[:2] == ("step", cell) for key in records)]
    lines = ["| step, over the bare base | against | words | " + " | ".join(cells) + " | wanted at 50M |"]
    lines.append("|---" * (len(cells) + 4) + "|")
    for name in [*OURS, *PEERS]:
        ratios = [records.get(("step", cell, name)) for cell in cells]
        if not any(ratios):
            continue
        shown = [f"{r['ratio']:.2f}" if r else "" for r in ratios]
        c = CONTENDERS[name]
        lines.append(f"| {name} | {c.against} | {c.words} | {' | '.join(shown)} | {c.limit or ''} |")
    lines += ["", "| whole training step | over AdamW fused |", "|---|---|"]
    for (part, cell, name), record in records.items():
        if part == "training":
            lines.append(f"| {name}, {cell} | {record['ratio']:.3f} |")
    lines += ["", "| memory, bytes per parameter | kept | passing |", "|---|---|---|"]
    for (part, _, name), record in records.items():
        if part == "memory":
            lines.append(f"| {name} | {record['kept']:.1f} | {max(record['passing'], 0):.1f} |")
    lines += ["", "| bandwidth, one thread | GB/s |", "|---|---|"]
    for (part, _, name), record in records.items():
        if part == "bandwidth":
            lines.append(f"| `{name}` | {record['gigabytes_per_second']:.0f} |")
    return "\n".join(lines)


def draw(records: dict[tuple[str, str, str], dict[str, Any]], folder: Path) -> None:
    import matplotlib.pyplot as plt

    from benchmarks.figures import LOOK

    colours = {"ours": "#0072B2", "graph": "#56B4E9", "peer": "#999999"}
    shown = ["AdamW in one graph, over fused", "Mechanic(AdamW, weight_decay=0)", "Mechanic(AdamW)"]
    shown += ["Mechanic(AdamW), on copies", "D-Adaptation", "Prodigy", "Schedule-Free", "mechanic-pytorch AdamW"]
    fused, foreach = (records["step", "50M", name] for name in ("Mechanic(AdamW)", "Mechanic(AdamW foreach)"))
    # Those measured against foreach, brought to the same scale.
    factors = {"AdamW fused": 1.0, "AdamW foreach": foreach["bare_ms"] / fused["bare_ms"]}
    with plt.rc_context(LOOK):
        figure, (bars, many) = plt.subplots(1, 2, figsize=(8.4, 3.1), width_ratios=(1.15, 1))
        for row, name in enumerate(reversed(shown)):
            record = records["step", "50M", name]
            ratio = record["ratio"] * factors[record["against"]]
            kind = "graph" if "graph" in name else "ours" if name in OURS else "peer"
            bars.barh(row, ratio, color=colours[kind])
            bars.text(ratio, row, f" {ratio:.1f}", va="center", fontsize=8)
        bars.set_yticks(range(len(shown)), [n.replace(", over fused", "") for n in reversed(shown)], fontsize=8)
        bars.axvline(1, color="black", linewidth=0.8)
        bars.set_xlabel("step time over fused AdamW, 50M parameters")
        bars.margins(x=0.12)
        lines = {"Mechanic(AdamW)": ("o", colours["ours"]), "AdamW in one graph, over fused": ("s", colours["graph"])}
        lines |= {"D-Adaptation": ("v", "#D55E00"), "Prodigy": ("D", "#CC79A7")}
        lines |= {"mechanic-pytorch AdamW": ("^", "#009E73")}
        counts = [n for n in (1, 10, 100, 1_000, 10_000) if ("step", f"2M in {n}", "Mechanic(AdamW)") in records]
        for name, (marker, colour) in lines.items():
            times = [records["step", f"2M in {n}", name]["ms"] for n in counts]
            many.plot(counts, times, marker=marker, color=colour, label=name.replace(", over fused", ""), markersize=4)
        bare = [records["step", f"2M in {n}", "Mechanic(AdamW)"]["bare_ms"] for n in counts]
        many.plot(counts, bare, "k--", label="AdamW fused")
        many.set(xscale="log", yscale="log", xlabel="tensors, 2M parameters in all", ylabel="ms per step")
        many.legend(fontsize=7)
        for suffix, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 160})):
            figure.savefig(folder / f"speed.{suffix}", **options)  # type: ignore[arg-type]
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--report", action="store_true", help="only print the tables and draw the figure")
    parser.add_argument("--only", nargs=2, metavar=("PART", "CELL"), help="measure one cell in this process")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    arguments = parser.parse_args()
    if arguments.only:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message="compile=True compiles around")
        part, cell = arguments.only
        if part == "step":
            measure_steps(cell, arguments.rounds)
        elif part == "training":
            measure_training(arguments.rounds)
        elif part == "memory":
            measure_memory(cell)
        else:
            measure_bandwidth()
        return
    if not arguments.report:
        parts = [("bandwidth", "50M"), *(("step", cell) for cell in CELLS), ("training", "GPT")]
        for part, cell in [*parts, *(("memory", name) for name in REMEMBERED)]:
            command = [sys.executable, "-m", "benchmarks.speed", "--only", part, cell]
            subprocess.run([*command, "--rounds", str(arguments.rounds)], check=True, env=os.environ)
    records = read()
    print(tables(records))
    draw(records, arguments.out)


if __name__ == "__main__":
    main()
