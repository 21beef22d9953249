"""The tables and the figure of the page on speed, from the records."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report.style import LOOK, plt, save
from benchmarks.speed.contenders import CELLS, CONTENDERS, OURS, PEERS
from benchmarks.speed.records import Records


def tables(records: Records) -> str:
    cells = [cell for cell in CELLS if any(key[:2] == ("step", cell) for key in records)]
    lines = ["| step, over the bare base | against | words | " + " | ".join(cells) + " | target at 50M |"]
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
    lines += ["", "| memory, bytes per parameter | state | temporary |", "|---|---|---|"]
    for (part, _, name), record in records.items():
        if part == "memory":
            lines.append(f"| {name} | {record['kept']:.1f} | {max(record['passing'], 0):.1f} |")
    lines += ["", "| bandwidth, one thread | GB/s |", "|---|---|"]
    for (part, _, name), record in records.items():
        if part == "bandwidth":
            lines.append(f"| `{name}` | {record['gigabytes_per_second']:.0f} |")
    return "\n".join(lines)


def draw(records: Records, folder: Path) -> None:
    colours = {"ours": "#0072B2", "peer": "#999999"}
    shown = ["Mechanic(AdamW, weight_decay=0)", "Mechanic(AdamW)", "Mechanic(AdamW), on copies"]
    shown += ["D-Adaptation", "Prodigy", "Schedule-Free", "mechanic-pytorch AdamW"]
    fused, foreach = (records["step", "50M", name] for name in ("Mechanic(AdamW)", "Mechanic(AdamW foreach)"))
    # Those measured against foreach, brought to the same scale.
    factors = {"AdamW fused": 1.0, "AdamW foreach": foreach["bare_ms"] / fused["bare_ms"]}
    with plt.rc_context(LOOK):
        figure, (bars, many) = plt.subplots(1, 2, figsize=(8.4, 3.1), width_ratios=(1.15, 1))
        for row, name in enumerate(reversed(shown)):
            record = records["step", "50M", name]
            ratio = record["ratio"] * factors[record["against"]]
            bars.barh(row, ratio, color=colours["ours" if name in OURS else "peer"])
            bars.text(ratio, row, f" {ratio:.1f}", va="center", fontsize=8)
        bars.set_yticks(range(len(shown)), shown[::-1], fontsize=8)
        bars.axvline(1, color="black", linewidth=0.8)
        bars.set_xlabel("step time over fused AdamW, 50M parameters")
        bars.margins(x=0.12)
        lines = {"Mechanic(AdamW)": ("o", colours["ours"]), "D-Adaptation": ("v", "#D55E00")}
        lines |= {"Prodigy": ("D", "#CC79A7"), "mechanic-pytorch AdamW": ("^", "#009E73")}
        counts = [n for n in (1, 10, 100, 1_000, 10_000) if ("step", f"2M in {n}", "Mechanic(AdamW)") in records]
        for name, (marker, colour) in lines.items():
            times = [records["step", f"2M in {n}", name]["ms"] for n in counts]
            many.plot(counts, times, marker=marker, color=colour, label=name, markersize=4)
        bare = [records["step", f"2M in {n}", "Mechanic(AdamW)"]["bare_ms"] for n in counts]
        many.plot(counts, bare, "k--", label="AdamW fused")
        many.set(xscale="log", yscale="log", xlabel="tensors, 2M parameters in all", ylabel="ms per step")
        many.legend(fontsize=7)
        save(figure, folder, "speed")
