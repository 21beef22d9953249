"""The command ``mechanic``: try it on your training, run a script with it, show what a checkpoint holds.

Only the arguments are read here. Each command imports what it needs, so that ``--help`` waits for no framework.
"""

from __future__ import annotations

import argparse
import ast
import sys
from typing import Any

from mechanic import __version__

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ModuleNotFoundError as error:
        if options.command == "run" or error.name != "torch":
            raise
        print('mechanic needs PyTorch: pip install "mechanic[torch]"', file=sys.stderr)
        return 1


def _try(options: argparse.Namespace) -> int:
    from mechanic.cli.trial import try_out

    try_out(options.target, options.base, options.lr, grid=options.grid, steps=options.steps, out=options.out)
    return 0


def _run(options: argparse.Namespace) -> int:
    from mechanic.cli.run import run
    from mechanic.cli.settings import Settings

    settings = Settings(
        only=tuple(options.only),
        per_group=options.per_group,
        config=dict(options.config),
        log=options.log_to,
        every=options.every,
        probe=options.probe,
    )
    if not options.script:
        options.parser.error("name the script to run, as in: mechanic run train.py")
    run(options.script[0], options.script[1:], settings, is_module=options.m)
    return 0


def _show(options: argparse.Namespace) -> int:
    from mechanic.cli.show import show

    print(show(options.checkpoint))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mechanic",
        description="Tune the learning rate while you train.",
        epilog="mechanic COMMAND --help has more.",
    )
    parser.add_argument("--version", action="version", version=f"mechanic {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_try(commands)
    _add_run(commands)
    _add_show(commands)
    return parser


def _add_try(commands: Any) -> None:
    trial = commands.add_parser(
        "try",
        help="compare Mechanic with your learning rate on your own training function",
        description="Train once with Mechanic and once with your learning rate, and say which was better.",
    )
    trial.add_argument("target", metavar="FILE.py:FUNCTION", help="takes an optimizer factory and yields the losses")
    trial.add_argument("--lr", type=float, required=True, help="the learning rate you use now")
    trial.add_argument("--base", default="torch.optim.AdamW", help="the optimizer you use now (default: %(default)s)")
    trial.add_argument("--grid", action="store_true", help="also try learning rates around yours")
    trial.add_argument("--steps", type=_positive, metavar="N", help="stop every run after N steps")
    trial.add_argument("--out", default="trial", metavar="DIR", help="where results and picture go (default: trial)")
    trial.set_defaults(run=_try)


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a training script as it is, with its optimizers wrapped",
        description="Run a training script as it is. Every optimizer it builds is wrapped in Mechanic.",
        usage="mechanic run [options] script.py [arguments ...]\n"
        "       mechanic run [options] -m module [arguments ...]",
    )
    run.add_argument("-m", action="store_true", help="run a module, as python -m does")
    run.add_argument(
        "--only", action="append", default=[], metavar="CLASS", help="wrap only this optimizer class; may be repeated"
    )
    run.add_argument("--per-group", action="store_true", help="learn a rate for each parameter group")
    run.add_argument(
        "--config",
        action="append",
        default=[],
        type=_setting,
        metavar="KEY=VALUE",
        help="a field of TunerConfig, such as decay=0.01; may be repeated",
    )
    # Not --log, which torchrun takes for one of its own even after the script's name.
    run.add_argument("--log-to", metavar="FILE", help="write the learned rates to a .jsonl or .csv file")
    run.add_argument("--every", type=_positive, default=10, metavar="N", help="log every N steps (default: 10)")
    run.add_argument("--probe", type=_positive, metavar="N", help="stop after N steps and print the learning rate")
    run.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.set_defaults(run=_run, parser=run)


def _add_show(commands: Any) -> None:
    show = commands.add_parser(
        "show",
        help="show what a checkpoint holds",
        description="Show what Mechanic has learned in a checkpoint: a file, or a folder of one.",
    )
    show.add_argument("checkpoint", metavar="FILE|DIR")
    show.set_defaults(run=_show)


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _setting(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (ValueError, SyntaxError) as error:
        raise argparse.ArgumentTypeError(f"{value!r} is not a value that Python can read") from error
