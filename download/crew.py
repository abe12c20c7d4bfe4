"""Threads that work through a list of files while the main thread shows progress and hears Ctrl-C."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from container.errors import DownloadError
from container.progress import BYTES, ProgressReport, duration
from download.listing import RemoteFile
from download.transfer import Stopped

POLL_SECONDS = 0.2
QUIET_SECONDS = 60.0
# How long a stopped thread may take: it looks around between pieces and waits.
LEAVE_SECONDS = 5.0


class HaltError(DownloadError):
    """Nothing more can be fetched, whichever file is next."""


@dataclass(frozen=True)
class Job:
    """One file's part of the work."""

    file: RemoteFile
    done_bytes: int = 0  # before this run: no progress of ours

    @property
    def n_bytes(self) -> int:
        """Bytes of work."""
        return self.file.n_bytes - self.done_bytes


# (file, a function to be told how many of the file's bytes are done)
Task = Callable[[RemoteFile, Callable[[int], None]], None]


class _Crew:
    def __init__(self, jobs: Sequence[Job], task: Task, stop: threading.Event) -> None:
        self.done = [job.done_bytes for job in jobs]
        self.failures: dict[str, DownloadError] = {}
        self.halted: BaseException | None = None
        self._jobs = jobs
        self._task = task
        self._stop = stop
        self._left = deque(range(len(jobs)))

    def work(self) -> None:
        """Take the next file until none is left, or all must stop."""
        while not self._stop.is_set():
            try:
                number = self._left.popleft()
            except IndexError:
                return
            try:
                self._task(self._jobs[number].file, functools.partial(self.done.__setitem__, number))
            except Stopped:
                return
            except HaltError as error:
                self._halt(error)
            except DownloadError as error:
                self.failures[self._jobs[number].file.name] = error
            except BaseException as error:  # a full disk, or a defect of ours: the main thread raises it
                self._halt(error)

    def _halt(self, error: BaseException) -> None:
        self.halted = self.halted or error
        self._stop.set()


class _View:
    """Shows how far the files are and, on a line that has been dead for long, that it is."""

    def __init__(self, report: ProgressReport, jobs: Sequence[Job], done: Sequence[int]) -> None:
        self._report = report
        self._jobs = jobs
        self._done = done
        self._seen = sum(done)
        self._moved = self._said = time.monotonic()

    def show(self) -> None:
        """Look at the counts again."""
        for number, job in enumerate(self._jobs):
            if job.n_bytes > 0:
                self._report.update(number, max(0, self._done[number] - job.done_bytes) / job.n_bytes)
        now, seen = time.monotonic(), sum(self._done)
        if seen != self._seen:
            self._seen, self._moved, self._said = seen, now, now
        elif now - self._said >= QUIET_SECONDS:
            self._said = now
            self._report.say(
                f"no new bytes for {duration(now - self._moved)}; still trying, Ctrl-C stops and keeps all"
            )

    def close(self) -> None:
        """Take the bar away."""
        self._report.close()


def work_through(
    jobs: Sequence[Job],
    task: Task,
    *,
    n_threads: int,
    stop: threading.Event,
    stream: TextIO,
    title: str,
) -> Mapping[str, DownloadError]:
    """Do `task` for every file, in order, `n_threads` at a time. Returns the error of each file that failed.

    One file's DownloadError stops no other; HaltError and any other exception set `stop`, which ends all, and are
    raised here. So does Ctrl-C.
    """
    if not jobs:
        return {}
    crew = _Crew(jobs, task, stop)
    # daemons: an impatient second Ctrl-C need not wait for a socket or a disk
    threads = [
        threading.Thread(target=crew.work, name=f"{title} {number}", daemon=True)
        for number in range(min(n_threads, len(jobs)))
    ]
    view = _View(ProgressReport(stream, title, [job.n_bytes for job in jobs], unit=BYTES), jobs, crew.done)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                view.show()
    finally:
        view.close()
        if any(thread.is_alive() for thread in threads):
            stop.set()
            leave(threads)
    if crew.halted is not None:
        raise crew.halted
    if stop.is_set():
        raise Stopped
    return crew.failures


def leave(threads: Sequence[threading.Thread]) -> None:
    """Give stopped threads a moment to end."""
    end = time.monotonic() + LEAVE_SECONDS
    for thread in threads:
        if thread.is_alive():  # Ctrl-C may come before all are started
            thread.join(max(0.0, end - time.monotonic()))
