"""Draw map.svg, the picture in CONTRIBUTING.md: the modules in their layers, as pyproject.toml's contracts have them.

``python docs/figures/draw_map.py``. Every module may import those below it, and none above.
"""

import ast
import textwrap
from html import escape
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
LINE, GAP, MARGIN = 52, 8, 16
FONT = "font-family='Helvetica, Arial, sans-serif'"


def first_sentence(module: str) -> str:
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n")[0].split(". ")[0].rstrip(".")


def layers_of(package: str) -> list[list[str]]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = (contract for contract in contracts if contract.get("containers") == [package])
    return [layer.split(" | ") for layer in found["layers"]]


def box(name: str, words: str, x: float, y: float, width: float) -> list[str]:
    lines = textwrap.wrap(words.replace("`", ""), int((width - 12) / 5.6), max_lines=2, placeholder=" …")
    colour = "#dcebd3" if name in ("step", "transform", "mechanic.tuner") else "#f4f1ea"
    shape = f"x='{x:.0f}' y='{y}' width='{width:.0f}' height='{LINE}' rx='4'"
    return [
        f"<rect {shape} fill='{colour}' stroke='#8a8577'/>",
        f"<text x='{x + 8:.0f}' y='{y + 16}' {FONT} font-size='13' font-weight='bold'>{name}</text>",
        *(
            f"<text x='{x + 8:.0f}' y='{y + 31 + 13 * i}' {FONT} font-size='10.5' fill='#444'>{escape(line)}</text>"
            for i, line in enumerate(lines)
        ),
    ]


def column(package: str, left: int, top: int, width: int) -> tuple[list[str], int]:
    """Boxes, one row per layer, and where they end."""
    parts = [f"<text x='{left}' y='{top}' {FONT} font-size='17' font-weight='bold'>{package}</text>"]
    top += 12
    for layer in layers_of(package):
        each = (width - GAP * (len(layer) - 1)) / len(layer)
        for i, name in enumerate(layer):
            parts += box(name, first_sentence(f"{package}.{name}"), left + i * (each + GAP), top, each)
        top += LINE + GAP
    return parts, top


def main() -> None:
    torch_width, jax_width = 590, 430
    jax_left = 2 * MARGIN + torch_width
    width = jax_left + jax_width + MARGIN
    torch, end_of_torch = column("mechanic.torch", MARGIN, 32, torch_width)
    jax, end_of_jax = column("mechanic.jax", jax_left, 32, jax_width)
    top = max(end_of_torch, end_of_jax) + 4
    tuner = box("mechanic.tuner", first_sentence("mechanic.tuner"), MARGIN, top, width - 2 * MARGIN)
    start = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{top + LINE + MARGIN}'>"
    paper = "<rect width='100%' height='100%' fill='white'/>"
    lines = [start, paper, *torch, *jax, *tuner, "</svg>"]
    (ROOT / "docs/figures/map.svg").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
