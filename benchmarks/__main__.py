"""``python -m benchmarks run SUITE`` and ``... report``. ``mechanic try`` is for a training of your own."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

from benchmarks.suite import plan
from benchmarks.suite.recordbook import RECORDS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run what is not recorded yet")
    run.add_argument("suite", choices=plan.SUITES)
    run.add_argument("--seeds", type=int, default=3)
    run.add_argument("--only", nargs="+", metavar="CONTENDER", help="some contenders, by name, e.g. 'mechanic adamw'")
    run.add_argument("--address", help="of a Ray cluster; without it, all cores of this machine")
    run.add_argument("--gpus-per-run", type=float, default=0.0, metavar="FRACTION", help="without it, CPUs only")
    run.add_argument("--checkpoint-minutes", type=float, default=10.0, help="how often long runs are saved")
    run.add_argument("--dry-run", action="store_true", help="list what would run, and how long")
    report = commands.add_parser("report", help="tables and figures from the records")
    report.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()

    if arguments.command == "report":
        from benchmarks.report import pages

        pages.write(arguments.records, arguments.out)
        return
    pairs = plan.SUITES[arguments.suite]
    if arguments.only:
        if unknown := set(arguments.only) - {contender.name for _, contender in pairs}:
            parser.error(f"--only: {arguments.suite} has no {', '.join(sorted(unknown))}")
        pairs = [(task, contender) for task, contender in pairs if contender.name in arguments.only]
    if arguments.dry_run:
        from benchmarks.suite import driver

        driver.list_runs(pairs, arguments.seeds, arguments.records, os.cpu_count() or 1)
        return
    from benchmarks.suite import runner

    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")
    outcome = runner.run_suite(
        pairs,
        arguments.seeds,
        arguments.records,
        arguments.address,
        gpus_per_run=arguments.gpus_per_run,
        checkpoint_minutes=arguments.checkpoint_minutes,
    )
    for what, why in outcome.not_run.items():
        print(f"not run: {what}: {why}")
    if outcome.not_run:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
