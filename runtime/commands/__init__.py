"""What `python -m runtime` can do: a module per command holds its command line and its work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from runtime.commands import bench, chat, evaluate, info, plan, run, tokens

__all__ = ["build_parser", "parse"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command. Ends the process with 2 for wrong usage, as argparse does."""
    parser = build_parser()
    arguments, left = parser.parse_known_args(argv)
    # before Python 3.13, argparse finds an optional TEXT only where it follows CONTAINER at once
    if len(left) == 1 and getattr(arguments, "text", "") is None and (left == ["-"] or not left[0].startswith("-")):
        arguments.text = left[0]
    elif left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The command line of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m runtime",
        description="Run a container: the trunk is held in memory as stored, experts are read from disk when needed.",
        epilog="Results go to stdout, the rest to stderr. Exit codes: 0 done, 1 error, 2 usage, 130 interrupted.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (run, chat, evaluate, plan, info, bench):
        command.add_parser(commands)
    tokens.add_parsers(commands)
    return parser
