"""Command line: `python -m runtime run|chat|eval|plan|info|bench|tokenize|detokenize CONTAINER`."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence

from container.command import exit_code_of, leave


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    return exit_code_of(lambda: _work(argv))


def _work(argv: Sequence[str] | None) -> int:
    # imported only now: Ctrl-C while modules are loaded is Ctrl-C too
    from runtime.commands import parse
    from runtime.commands.streams import Streams

    arguments = parse(argv)
    if isinstance(sys.stdin, io.TextIOWrapper):  # what someone types or pipes may be no text
        sys.stdin.reconfigure(errors="replace")
    code: int = arguments.work(arguments, Streams(sys.stdin, sys.stdout, sys.stderr, _ask))
    return code


def _ask(prompt: str) -> str:
    """The user's next line: with the terminal's line editing where there is one. Raises EOFError."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - its presence gives `input` editing and history
        try:
            return input(prompt)
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)  # the cursor still stands behind the prompt
            raise
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


if __name__ == "__main__":
    sys.exit(leave(main()))
