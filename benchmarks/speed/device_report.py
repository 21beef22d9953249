"""A record of :mod:`benchmarks.speed.on_gpu` as tables in Markdown."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]


def tables(record: Record) -> str:
    about = record["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [f"{about['device']}; {versions}; medians of {about['rounds']}"]
    if about["tiny"]:
        lines += ["", "**Tiny mode: this tries the command. The figures mean nothing.**"]
    for dtype in ("float32", "bfloat16"):
        lines += _steps([row for row in record["steps"] if row["dtype"] == dtype], dtype)
    lines += ["", "| training step | ms | over AdamW fused | peak, GB |", "|---|---|---|---|"]
    bare = next((row.get("ms") for row in record["training"] if row["contender"] == "AdamW fused"), None)
    for row in record["training"]:
        said = [_said(row, "ms"), _ratio(row, bare), str(row.get("peak_gb", ""))]
        lines.append(f"| {row['contender']} | {' | '.join(said)} |")
    return "\n".join(lines)


def _steps(rows: list[dict[str, Any]], dtype: str) -> list[str]:
    head = ["ms", "host ms", "over AdamW fused", "kept, bytes per parameter", "passing, bytes per parameter"]
    lines = ["", f"| step, {dtype} | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    bare = next((row.get("ms") for row in rows if row["contender"] == "AdamW fused"), None)
    for row in rows:
        figures = [_said(row, "ms"), str(row.get("host_ms", "")), _ratio(row, bare)]
        figures += [str(row.get(key, "")) for key in ("kept_bytes", "passing_bytes")]
        lines.append(f"| {row['contender']} | {' | '.join(figures)} |")
    return lines


def _said(row: dict[str, Any], key: str) -> str:
    """A figure, or why there is none."""
    if key in row:
        return str(row[key])
    kind = "skipped" if "skipped" in row else "failed"
    return f"{kind}: {' '.join(str(row.get(kind)).split())}".replace("|", "/")


def _ratio(row: dict[str, Any], bare: float | None) -> str:
    return f"{row['ms'] / bare:.2f}" if bare and "ms" in row else ""
