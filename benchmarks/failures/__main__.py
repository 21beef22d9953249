"""``python -m benchmarks.failures run [--only ROW] [--contender C]`` and ``... page``."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.failures import page, runner
from benchmarks.failures.contenders import CONTENDERS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failures", description=__doc__)
    parser.add_argument("--records", type=Path, default=runner.RECORDS)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run cells and record them")
    run.add_argument(
        "--only", action="append", metavar="ROW", choices=list(runner.ROWS), help="may be given repeatedly"
    )
    run.add_argument("--contender", action="append", choices=list(CONTENDERS), help="may be given repeatedly")
    commands.add_parser("list", help="print the names of all situations")
    make = commands.add_parser("page", help="write the page of the docs from the records")
    make.add_argument("--out", type=Path, default=page.PAGE)
    arguments = parser.parse_args()

    if arguments.command == "list":
        print("\n".join(runner.ROWS))
    elif arguments.command == "page":
        arguments.out.write_text(page.render(runner.read(arguments.records)))
    else:
        rows, columns = arguments.only or runner.ROWS, arguments.contender or CONTENDERS
        runner.run([(row, key) for row, key in runner.all_cells() if row in rows and key in columns], arguments.records)


if __name__ == "__main__":
    main()
