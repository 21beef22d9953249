"""``python -m benchmarks run SUITE`` and ``... report``. ``mechanic try`` is for a training of your own."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

from benchmarks.contest import plan as contest
from benchmarks.suite import driver, plan
from benchmarks.suite.driver import Outcome
from benchmarks.suite.recordbook import RECORDS, RecordBook

VERDICT = "verdict"  # the contest, whose second part is planned by the records of its first


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run what is not recorded yet")
    run.add_argument("suite", choices=[*plan.SUITES, VERDICT])
    run.add_argument("--seeds", type=int, default=3)
    run.add_argument(
        "--only", nargs="+", metavar="NAME", help="some contenders or tasks, e.g. 'mechanic adamw' cnn-mnist"
    )
    run.add_argument("--address", help="of a Ray cluster; without it, all cores of this machine")
    run.add_argument("--gpus-per-run", type=float, default=0.0, metavar="FRACTION", help="without it, CPUs only")
    run.add_argument("--dry-run", action="store_true", help="list what would run, and how long")
    report = commands.add_parser("report", help="tables and figures from the records")
    report.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()

    if arguments.command == "report":
        from benchmarks.report import pages

        pages.write(arguments.records, arguments.out)
        return
    if arguments.suite == VERDICT:
        if arguments.only:
            parser.error(f"--only: {VERDICT} is of all methods")
        _report(_run_contest(arguments))
        return
    pairs = plan.SUITES[arguments.suite]
    if arguments.only:
        wanted, tasks, contenders = set(arguments.only), {t.name for t, _ in pairs}, {c.name for _, c in pairs}
        if unknown := wanted - tasks - contenders:
            parser.error(f"--only: {arguments.suite} has no {', '.join(sorted(unknown))}")
        tasks, contenders = wanted & tasks or tasks, wanted & contenders or contenders
        pairs = [pair for pair in pairs if pair[0].name in tasks and pair[1].name in contenders]
    if arguments.dry_run:
        remaining = driver.Remaining(pairs, RecordBook(arguments.records), arguments.seeds)
        driver.list_runs(remaining, os.cpu_count() or 1)
        return
    from benchmarks.suite import runner

    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")
    outcome = runner.run_suite(
        pairs,
        arguments.seeds,
        arguments.records,
        arguments.address,
        gpus_per_run=arguments.gpus_per_run,
    )
    _report(outcome)


def _run_contest(arguments: argparse.Namespace) -> Outcome:
    book = RecordBook(arguments.records / contest.FOLDER)
    if arguments.dry_run:
        driver.list_runs(contest.Contest(book, arguments.seeds), os.cpu_count() or 1)
        return Outcome()
    from benchmarks.suite import runner

    return runner.run_work(
        lambda missing: contest.Contest(book, arguments.seeds, missing),
        contest.TASKS.values(),
        book,
        arguments.address,
        gpus_per_run=arguments.gpus_per_run,
        find=contest.find,
    )


def _report(outcome: Outcome) -> None:
    for what, why in outcome.not_run.items():
        print(f"not run: {what}: {why}")
    if outcome.not_run:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
