"""Command line: `python -m runtime eval|info CONTAINER`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from container.command import exit_code_of
from container.errors import MoedockError, UsageError

if TYPE_CHECKING:
    from runtime.commands import Result


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    return exit_code_of(lambda: _show(options))


def _show(options: argparse.Namespace) -> int:
    try:
        result = _run(options)
    except MemoryError:
        raise MoedockError(f"{options.container}: not enough memory; its trunk is held in memory as stored") from None
    print(json.dumps(result.json) if options.json else result.text)
    return 0


def _run(options: argparse.Namespace) -> Result:
    # imported only now: --help and usage errors should not wait for the compiled kernels
    from runtime import commands

    if options.command == "info":
        return commands.info(options.container)
    if (options.ids is None) == (options.text is None):
        raise UsageError("give the prompt either as TEXT or with --ids")
    return commands.evaluate(
        options.container,
        ids=options.ids,
        text=options.text,
        top=options.top,
        dump_logits=options.dump_logits,
        verify=options.verify,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runtime",
        description="Run a container: the trunk is held in memory as stored, experts are read from disk one at a time.",
        epilog="Results go to stdout, the rest to stderr. Exit codes: 0 done, 1 error, 2 usage, 130 interrupted.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    ev = commands.add_parser(
        "eval",
        help="feed a prompt and show the likeliest next tokens",
        description=_EVAL,
        epilog=_EVAL_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ev.add_argument("container", type=Path, metavar="CONTAINER", help="folder with manifest.json")
    ev.add_argument("text", nargs="?", metavar="TEXT", help="the prompt; needs the container's tokenizer")
    ev.add_argument("--ids", type=_ids, metavar="ID,ID,…", help="the prompt as token ids, instead of TEXT")
    ev.add_argument("--top", type=_count, default=10, metavar="N", help="next tokens to show (default 10)")
    ev.add_argument("--json", action="store_true", help="print one JSON object")
    ev.add_argument(
        "--dump-logits", type=Path, metavar="FILE.npy", help="write the logits of every position, [T, vocabulary] f32"
    )
    ev.add_argument("--verify", action="store_true", help="check the checksum of everything that is read")

    info = commands.add_parser("info", help="show what a container holds", description="Show what a container holds.")
    info.add_argument("container", type=Path, metavar="CONTAINER", help="folder with manifest.json")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


_EVAL = "Feed a prompt, token by token, and show the likeliest next tokens."
_EVAL_EXAMPLES = """\
examples:
  python -m runtime eval model.waste "The capital of France is"
  python -m runtime eval model.waste --ids 18805,308,799 --dump-logits logits.npy"""


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,2,3") from None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
