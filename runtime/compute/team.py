"""Threads that compute: one piece of work cut into contiguous parts, which the caller and the members take in turn.

A part never reads what another writes, and what an item's result is does not depend on where the cuts are; so the
number of threads decides how long work takes, never what comes out. Members sleep between two pieces of work. The
caller waits for parts that are being worked on, never for a member that has not woken yet: short work, or work on
a busy machine, is then done by the caller alone.

Hand-overs are single calls that the interpreter's lock makes atomic (`next` of a counter, a lock's `release`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count, pairwise

import numpy as np

Part = Callable[[int, int], None]  # (start, stop): items start to stop - 1

_LARGE_PARTS_SHARE = 0.75


class Team:
    """`n_threads` threads, the calling one included. `run` is for one caller at a time."""

    def __init__(self, n_threads: int) -> None:
        if n_threads < 1:
            raise ValueError(f"a team of {n_threads} threads")
        self._members = [_Member() for _ in range(n_threads - 1)]
        self._is_running = False

    @property
    def n_threads(self) -> int:
        """Threads that take part, the caller included."""
        return len(self._members) + 1

    def run(self, work: Part, n_items: int, *, least: int = 1) -> None:
        """Call `work` on parts that cover 0 to n_items once; return when all are done. Raises what a part raises.

        Work of fewer than `2 * least` items is not shared: waking a member would take longer. Where Ctrl-C makes the
        caller leave before all is done, the next call waits for the members to finish their parts.
        """
        if self._is_running:
            self._renew()
        if n_items < 2 * least or not self._members:
            if n_items:
                work(0, n_items)
            return
        self._is_running = True
        job = _Job(work, _parts(n_items, min(self.n_threads, n_items // least)))
        for member in self._members:
            member.wake(job)
        job.take_parts()
        job.wait()
        self._is_running = False
        job.raise_error()

    def run_all(self, works: Sequence[tuple[Part, int]], *, least: int = 1) -> None:
        """`run` for several works at once, each with its number of items: waking a member costs once."""

        def parts_of_each(start: int, stop: int) -> None:
            for work, n_items in works:
                if start < n_items and stop > 0:
                    work(max(start, 0), min(stop, n_items))
                start, stop = start - n_items, stop - n_items

        self.run(parts_of_each, sum(n_items for _, n_items in works), least=least)

    def close(self) -> None:
        """End the threads."""
        for member in self._members:
            member.end()
        self._members = []

    def _renew(self) -> None:
        """Other members for those that may still be at work; an interrupt on the way leaves it to be done again."""
        for n, member in enumerate(self._members):
            member.end()
            self._members[n] = _Member()
        self._is_running = False


@lru_cache(maxsize=1024)
def _parts(n_items: int, n_threads: int) -> list[tuple[int, int]]:
    """(start, stop) of one large part for each thread and one small, so that none waits long for another at the end."""
    large = [_LARGE_PARTS_SHARE * n / n_threads for n in range(n_threads)]
    small = [_LARGE_PARTS_SHARE + (1 - _LARGE_PARTS_SHARE) * n / n_threads for n in range(n_threads + 1)]
    cuts = [round(n_items * share) for share in large + small]
    return [(start, stop) for start, stop in pairwise(cuts) if start < stop]


class _Job:
    """One piece of work, and which of its parts are taken and done."""

    def __init__(self, work: Part, parts: list[tuple[int, int]]) -> None:
        self._work, self._parts = work, parts
        self._taken, self._done = count(), count(1)
        self._errors: list[BaseException] = []
        self._all_done = threading.Lock()
        self._all_done.acquire()

    def take_parts(self) -> None:
        """Work on parts until none is left to take."""
        parts = self._parts
        while (n := next(self._taken)) < len(parts):
            try:
                self._work(*parts[n])
            except BaseException as error:
                self._errors.append(error)
            if next(self._done) == len(parts):
                self._all_done.release()

    def wait(self) -> None:
        """Return when all parts are done."""
        self._all_done.acquire()

    def raise_error(self) -> None:
        """Raise what one of the parts raised, if any did."""
        if self._errors:
            raise self._errors[0]


class _Member:
    """One thread that helps with the newest job."""

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._go = threading.Lock()  # locked: nothing to wake up for
        self._go.acquire()
        self._thread = threading.Thread(target=self._loop, name="moedock-compute", daemon=True)
        self._thread.start()

    def wake(self, job: _Job | None) -> None:
        """Help with `job`, or end where it is None."""
        self._job = job
        if self._go.locked():  # otherwise it is about to wake up anyway
            self._go.release()

    def end(self) -> None:
        """End the thread."""
        self.wake(None)
        self._thread.join()

    def _loop(self) -> None:
        with np.errstate(all="ignore"):  # a thread's own setting: damaged weights may be NaN or infinite
            while True:
                self._go.acquire()
                job = self._job
                if job is None:
                    return
                job.take_parts()
