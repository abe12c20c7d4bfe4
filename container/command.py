"""What commands share: token ids as arguments, output that any terminal takes, signals, exit codes for errors."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator

from container.errors import MoedockError, shown

FAILED = MoedockError.exit_code
INTERRUPTED = 130


def exit_code_of(work: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command's `work`, which prints its result to stdout and returns its exit code, and return that code.

    An error of ours, or of the system (a path that it refuses, a full disk), becomes one line on stderr and the
    error's code (1; 2 for usage); Ctrl-C and SIGTERM become the line `interrupted` and 130.
    """
    _take_any_streams()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _interruptions_that_come_through():
            code = work()
        sys.stdout.flush()
        return code
    except MoedockError as error:
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _failed(interrupted, INTERRUPTED, mark="")
    except BrokenPipeError:
        # the reader of our output is gone; the interpreter must not try to flush into it on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _failed(str(error), FAILED)


def _take_any_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the process was started without it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path may be no text, a terminal know less than Unicode
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _interruptions_that_come_through() -> Iterator[None]:
    """Python drops a KeyboardInterrupt in a callback from C, as compilers make: what fails then was interrupted too."""
    dropped = False
    show = sys.unraisablehook

    def note(problem: sys.UnraisableHookArgs) -> None:
        nonlocal dropped
        if issubclass(problem.exc_type, KeyboardInterrupt):
            dropped = True
        else:
            show(problem)

    sys.unraisablehook = note
    try:
        yield
    except Exception:
        if dropped:
            raise KeyboardInterrupt from None
        raise
    finally:
        sys.unraisablehook = show


def leave(code: int) -> int:
    """`code`, for a process that has nothing left to do: from here on a signal ends it at once, without a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    return code


def token_ids(text: str) -> list[int]:
    """Ids separated by commas or spaces, as an argument's type."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no list of whole numbers such as 1,2,3") from None


def _failed(line: str, code: int, mark: str = "error: ") -> int:
    with contextlib.suppress(OSError):  # a terminal that is gone
        sys.stderr.write(f"{mark}{line}\n")
        sys.stderr.flush()
    return code


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
