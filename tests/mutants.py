"""Mutation testing by hand: change the code in small ways, and see whether a test notices.

    python -m tests.mutants run --sample 320 --seed 0 --records mutants.jsonl
    python -m tests.mutants show mutants.jsonl

The changes are those of cosmic-ray (pip install cosmic-ray). Changes that only annotations would show are left out.
Every mutant is tried in a process of its own, in a copy of the tree, until a test fails: the quick tests that run the
changed line, as coverage found, then with ``--long`` the long tests. Imports of the frameworks are shared by forking.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent

LONGEST = 900  # seconds that a mutant may take before it counts as noticed: it hangs


Found = dict[str, dict[int, list[str]]]  # by path and line, the quick tests that run it


def tests_by_line(folder: Path) -> Found:
    """Runs the quick tests once."""
    from coverage import CoverageData

    environment = {**os.environ, "COVERAGE_FILE": str(folder / "coverage")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "quick",
        "-n2",
        "--cov",
        "--cov-context=test",
        "--cov-report=",
    ]
    subprocess.run([*command, "tests/shared", "tests/torch", "tests/jax"], check=True, cwd=ROOT, env=environment)
    data = CoverageData(str(folder / "coverage"))
    data.read()
    return {
        str(Path(path).relative_to(ROOT)): {
            line: sorted({context.partition("|")[0] for context in contexts if context})
            for line, contexts in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }


def tests_for(path: str, lines: range, found: Found, long: bool) -> list[list[str]]:
    """Arguments of pytest, one run after the other."""
    by_line = found.get(path, {})
    quick = sorted({test for line in lines for test in by_line.get(line, [])})
    quick.sort(key=lambda test: Path(path).stem not in test)
    framework = Path(path).parent.name
    folders = [f"tests/{framework}"] if framework in ("torch", "jax") else ["tests/torch", "tests/jax"]
    everything = ["-m", "quick", "tests/shared", *folders]  # where no test in particular runs it: when it is imported
    return [quick or everything, *([["-m", "long", *folders]] if long else [])]


def meaning(code: str) -> str:
    """The code as Python runs it: without annotations and docstrings."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            arguments = (
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            )
            for argument in filter(None, arguments):
                argument.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value = ast.Constant(None)
    return ast.dump(tree)


def sample(size: int, seed: int, only: list[str]) -> list[tuple[str, str, int]]:
    """(path, operator, occurrence) of changes that Python could notice, drawn from all files, or from some."""
    from cosmic_ray.commands.init import _all_work_items
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    files = [ROOT / "src/mechanic/config.py", ROOT / "src/mechanic/tuner.py"]
    files += [path for kind in ("torch", "jax") for path in sorted((ROOT / "src/mechanic" / kind).rglob("*.py"))]
    files = [path for path in files if not only or any(part in str(path) for part in only)]
    everything = [item.mutations[0] for item in _all_work_items(files, {})]
    random.Random(seed).shuffle(everything)
    print(f"{len(everything)} changes to {len(files)} files, {size} of them drawn with seed {seed}", flush=True)
    drawn: list[tuple[str, str, int]] = []
    for mutation in everything:
        if len(drawn) == size:
            break
        path = str(Path(mutation.module_path).relative_to(ROOT))
        code = (ROOT / path).read_text()
        mutated = mutate_code(code, get_operator(mutation.operator_name)(), mutation.occurrence)
        try:
            if mutated is not None and meaning(mutated) != meaning(code):
                drawn.append((path, mutation.operator_name, mutation.occurrence))
        except SyntaxError:
            continue
    return drawn


def work(number: int, jobs: list[tuple[str, str, int]], found: Found, long: bool, records: Path) -> None:
    """Try mutants one after the other, in a copy of the tree."""
    # Imported once, for all children.
    import jax  # noqa: F401
    import optax  # noqa: F401
    import pytorch_optimizer  # noqa: F401
    import schedulefree  # noqa: F401
    import torch._dynamo
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    torch.set_num_threads(1)
    home = Path(tempfile.mkdtemp(prefix=f"mutants-{number}-"))
    for part in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (home / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / part, home / part)
    if try_tests(home, ["-m", "quick", "tests/shared"]) != "survived":
        raise SystemExit("the tests fail without any change")
    for path, operator, occurrence in jobs:
        code = (home / path).read_text()
        mutated = mutate_code(code, get_operator(operator)(), occurrence)
        (home / path).write_text(mutated)
        began = time.monotonic()
        change = list(difflib.unified_diff(code.splitlines(), mutated.splitlines(), lineterm="", n=0))[2:]
        first, _, count = change[0].split()[1][1:].partition(",")
        lines = range(int(first), int(first) + int(count or 1))
        outcomes = (try_tests(home, tests) for tests in tests_for(path, lines, found, long))
        outcome = next((outcome for outcome in outcomes if outcome != "survived"), "survived")
        (home / path).write_text(code)
        record = {"path": path, "operator": operator, "occurrence": occurrence, "change": change}
        record |= {"outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
        with records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{number}: {outcome:8} {record['seconds']:6} s  {path} {change[0]}", flush=True)
    shutil.rmtree(home)


def try_tests(home: Path, tests: list[str]) -> str:
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(home)
        sys.path[:0] = [str(home / "src"), str(home)]
        os.environ["PYTHONPATH"] = f"{home / 'src'}{os.pathsep}{home}"
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "mechanic")]:
            del sys.modules[name]  # this module is part of the package that is to be imported from the copy
        sys.dont_write_bytecode = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        import pytest

        # Plugins of pytest were imported before it.
        ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *ignored, *tests])
        os._exit(int(code))
    until = time.monotonic() + LONGEST
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def show(records: Path) -> None:
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    survivors = [row for row in rows if row["outcome"] == "survived"]
    equivalent = [row for row in survivors if "explanation" in row]  # written by hand: nobody could notice
    noticed = len(rows) - len(survivors)
    print(f"{len(rows)} mutants, {noticed} noticed ({noticed / len(rows):.1%}), {len(equivalent)} survivors explained")
    for row in survivors:
        print(f"\n{row['path']}  {row['operator']} {row['occurrence']}")
        print("\n".join([*row["change"], row.get("explanation", "")]).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--sample", type=int, default=320)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--only", nargs="*", default=[], metavar="PART", help="files with one of these in their path")
    run.add_argument("--records", type=Path, default=Path("mutants.jsonl"))
    run.add_argument("--workers", type=int, default=2)
    run.add_argument("--long", action="store_true", help="where the quick tests notice nothing; takes hours")
    commands.add_parser("show").add_argument("records", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "show":
        show(arguments.records)
        return
    done = set()
    if arguments.records.exists():  # go on where a run was stopped
        rows = [json.loads(line) for line in arguments.records.read_text().splitlines()]
        done = {(row["path"], row["operator"], row["occurrence"]) for row in rows}
    jobs = [job for job in sample(arguments.sample, arguments.seed, arguments.only) if job not in done]
    with tempfile.TemporaryDirectory() as folder:
        found = tests_by_line(Path(folder))
    context = multiprocessing.get_context("spawn")
    records = arguments.records.resolve()
    workers = [
        context.Process(target=work, args=(number, jobs[number :: arguments.workers], found, arguments.long, records))
        for number in range(arguments.workers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    show(arguments.records)


if __name__ == "__main__":
    main()
