"""Conversions as real process trees: started, watched through /proc, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.convert.small import REPOSITORY


class Running:
    """`python -m convert` in a session of its own, so that a whole tree can be signalled or searched for survivors."""

    def __init__(self, source: Path, output: Path, *options: str) -> None:
        self.output = output
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "convert",
                str(source),
                str(output),
                "--workers",
                "2",
                "--quality",
                "fast",
                *options,
            ],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=default_signals,
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.members():
            _signal(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()

    def members(self) -> list[int]:
        """Living processes of the session, the parent included."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                state, session = _state(int(folder.name))
                if session == self.process.pid and state not in "ZX":
                    found.append(int(folder.name))
        return found

    def workers(self) -> list[int]:
        """Living worker processes."""
        return [pid for pid in self.members() if pid != self.process.pid and "spawn_main" in _command(pid)]

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait for something to become true while the conversion runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    def wait_for_jobs(self, *jobs: str) -> None:
        """Wait until the jobs' records are published."""
        self.wait_until(lambda: all((self.output / ".build" / f"done-{job}.json").exists() for job in jobs))

    def signal(self, number: signal.Signals) -> None:
        """Signal the parent."""
        _signal(self.process.pid, number)

    def signal_all(self, number: signal.Signals) -> None:
        """Signal the whole group, as a terminal does for Ctrl-C."""
        os.killpg(self.process.pid, number)

    def finish(self, seconds: float = 60) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=seconds)
        return self.process.returncode, stdout, stderr

    def seconds_until_nobody_is_left(self, limit: float = 20) -> float:
        """How long the last member of the session takes to end."""
        start = time.monotonic()
        while self.members():
            assert time.monotonic() - start < limit, [_command(pid) for pid in self.members()]
            time.sleep(0.01)
        return time.monotonic() - start


def kill_one(pid: int) -> None:
    """SIGKILL one process."""
    _signal(pid, signal.SIGKILL)


def default_signals() -> None:
    """A background shell may have started the tests with Ctrl-C ignored; a user's terminal does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself in the meantime


def _state(pid: int) -> tuple[str, int]:
    """(state letter, session) of a process; ("X", 0) when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return fields[0], int(fields[3])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
