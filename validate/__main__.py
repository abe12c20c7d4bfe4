"""`python -m validate`: prove a container right."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from container.command import exit_code_of, leave, token_ids
from validate.render import report_text
from validate.run import DEFAULT_TOLERANCE, DEFAULT_WINDOW, Options, validate


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m validate",
        description="Prove a container right: every byte, header and checksum; with --source every weight against the "
        "checkpoint; with --logits the runtime against the PyTorch reference; with --text what quantisation changes.",
        epilog="The result goes to stdout, progress and errors to stderr. Exit codes: 0 all checks hold, 1 one does "
        "not, 2 usage, 130 interrupted.",
    )
    parser.add_argument("container", metavar="CONTAINER", type=Path, help="folder with manifest.json")
    parser.add_argument("--source", metavar="CKPT", type=Path, help="the checkpoint folder it was made of")
    parser.add_argument(
        "--logits",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compare runtime and reference (default: when the model is small)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=DEFAULT_TOLERANCE,
        metavar="X",
        help="largest relative error of the logits at any position (default: %(default)g)",
    )
    parser.add_argument(
        "--experts", type=int, metavar="N", help="compare only N experts of each layer with the checkpoint"
    )
    parser.add_argument(
        "--ids", type=token_ids, metavar="ID,ID,…", help="the prompt to compare logits on, as token ids"
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help="measure on this UTF-8 text, with --source, what quantisation does to the model: perplexity, divergence, "
        "first choices",
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help=f"tokens of the text read in one go (default: {DEFAULT_WINDOW}). Every window begins with an empty state: "
        "its first tokens are predicted from little, so a short window makes both perplexities higher than users see",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="read only the first N tokens of the text")
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: as the machine allows)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 all holds, 1 it does not, 2 wrong usage, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    return exit_code_of(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    options = Options(
        container=arguments.container,
        source=arguments.source,
        logits=arguments.logits,
        tolerance=arguments.tolerance,
        n_experts=arguments.experts,
        ids=arguments.ids,
        workers=arguments.workers,
        text=arguments.text,
        window=arguments.window,
        max_tokens=arguments.max_tokens,
    )
    report = validate(options, sys.stderr)
    print(json.dumps(report.to_json(), indent=1) if arguments.json else report_text(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(leave(main()))
