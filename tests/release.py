"""``make release-check``: build what would be released, look into it, and use it as somebody who installs it would.

    python -m tests.release

It needs `build` and `twine`. The environment that the wheel is installed into is made in a temporary folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IN_SDIST = (
    "src/mechanic/tuner.py",
    "tests/conftest.py",
    "examples/",
    "algoperf/",
    "benchmarks/suite/",
    "docs/index.md",
    "LICENSE",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        sdist, wheel = timed("build", lambda: build(out))
        timed("contents", lambda: check_contents(sdist, wheel))
        timed("twine", lambda: run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel))
        python = out / "venv" / "bin" / "python"
        timed("install into an empty environment", lambda: install(python, wheel))
        timed("the README's lines", lambda: run(python, "-W", "error", quickstart(out), cwd=out))
        command = python.with_name("mechanic")
        timed("mechanic run", lambda: run(command, "run", ROOT / "tests/cli/scripts/language_model.py", cwd=out))
        training = f"{ROOT / 'examples/own_training.py'}:train"
        timed("mechanic try", lambda: run(command, "try", training, "--lr", 1e-3, cwd=out))
        timed("changelog", check_changelog)
        links = relative_links(wheel)
    print(
        "ready, but for the list in CONTRIBUTING.md" if not links else f"no address is set: {links} links are relative"
    )


def build(out: Path) -> tuple[Path, Path]:
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def check_contents(sdist: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = {name.partition("/")[0] for name in names}
    assert len(packages) == 2, f"the wheel has more than the package and its metadata: {packages}"
    for wanted in ("mechanic/py.typed", "mechanic/torch/optimizer.py", "mechanic/jax/transform.py"):
        assert wanted in names, f"the wheel lacks {wanted}"
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    for wanted in IN_SDIST:
        assert any(name.startswith(wanted) for name in names), f"the sdist lacks {wanted}"
    for name in names:
        assert "__pycache__" not in name, f"the sdist has {name}"
        assert not name.startswith(("docs/_build", "benchmarks/records", ".venv")), f"the sdist has {name}"
    sizes = f"{wheel.stat().st_size >> 10} KiB, sdist {sdist.stat().st_size >> 10} KiB"
    print(f"   wheel {sizes}")


def install(python: Path, wheel: Path) -> None:
    run(sys.executable, "-m", "venv", python.parents[1])
    # As users have it, but at our version: the newest torch may be several gigabytes.
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", "torch")
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[torch,cli,examples]")


def quickstart(out: Path) -> Path:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    script = out / "readme.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)), encoding="utf-8")
    return script


def check_changelog() -> None:
    version = re.search(r'__version__ = "(.*)"', (ROOT / "src/mechanic/__init__.py").read_text())
    assert version is not None
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {version[1]}" in text, f"CHANGELOG.md has no section for {version[1]}"


def relative_links(wheel: Path) -> int:
    """Of the README as PyPI would show it; there they lead nowhere."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
        text = archive.read(metadata).decode()
    return len(re.findall(r"\]\((?!https?:|#)", text))


def run(*command: object, cwd: Path | None = None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # nothing from the checkout
    subprocess.run([str(word) for word in command], check=True, cwd=cwd, env=env, timeout=1200)


def timed(what: str, job):  # type: ignore[no-untyped-def]
    print(f"== {what}", flush=True)
    began = time.monotonic()
    result = job()
    print(f"   {time.monotonic() - began:.0f} s", flush=True)
    return result


if __name__ == "__main__":
    main()
