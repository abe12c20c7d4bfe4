"""What every command does around its work: output that any terminal takes, signals, and exit codes for errors."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable

from container.errors import MoedockError

FAILED = MoedockError.exit_code
INTERRUPTED = 130


def exit_code_of(work: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command's `work`, which prints its result to stdout and returns its exit code, and return that code.

    An error of ours, or of the system (a path that it refuses, a full disk), becomes one line on stderr and the
    error's code (1; 2 for usage); Ctrl-C and SIGTERM become the line `interrupted` and 130.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path may be no text, a terminal know less than Unicode
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
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


def _failed(line: str, code: int, mark: str = "error: ") -> int:
    with contextlib.suppress(OSError):  # a terminal that is gone
        sys.stderr.write(f"{mark}{line}\n")
        sys.stderr.flush()
    return code


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
