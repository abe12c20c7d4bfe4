"""Threads that compute: one piece of work cut into contiguous parts, one per thread, the caller being one of them.

A part never reads what another writes, and what an item's result is does not depend on where the cuts are; so the
number of threads decides how long work takes, never what comes out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

Part = Callable[[int, int], None]  # (start, stop): items start to stop - 1


class Team:
    """`n_threads` threads, the calling one included. `run` is for one caller at a time."""

    def __init__(self, n_threads: int) -> None:
        if n_threads < 1:
            raise ValueError(f"a team of {n_threads} threads")
        self._members = [_Member() for _ in range(n_threads - 1)]

    @property
    def n_threads(self) -> int:
        """Threads that take part, the caller included."""
        return len(self._members) + 1

    def run(self, work: Part, n_items: int) -> None:
        """Call `work` on parts that cover 0 to n_items once; return when all are done. Raises what a part raises."""
        cuts = [n_items * n // self.n_threads for n in range(self.n_threads + 1)]
        parts = [(start, stop) for start, stop in pairwise(cuts) if start < stop]
        busy = list(zip(self._members, parts[1:], strict=False))
        for member, part in busy:
            member.start(work, part)
        try:
            if parts:
                work(*parts[0])
        finally:
            errors = [member.wait() for member, _ in busy]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads."""
        for member in self._members:
            member.end()
        self._members = []


class _Member:
    """One thread that waits for parts."""

    def __init__(self) -> None:
        self._work: Part | None = None
        self._part = (0, 0)
        self._error: BaseException | None = None
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._loop, name="moedock-compute", daemon=True)
        self._thread.start()

    def start(self, work: Part, part: tuple[int, int]) -> None:
        self._work, self._part, self._error = work, part, None
        self._go.release()

    def wait(self) -> BaseException | None:
        self._done.acquire()
        return self._error

    def end(self) -> None:
        self._work = None
        self._go.release()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            self._go.acquire()
            if self._work is None:
                return
            try:
                self._work(*self._part)
            except BaseException as error:
                self._error = error
            self._done.release()
