"""Threads that read: what somebody waits for first, then what will probably be wanted, then what may be."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, unique
from itertools import count

from container.records import ExpertRecord
from runtime.disk.books import Bell, Books


@unique
class Cause(IntEnum):
    """Why a record is read; the lower number goes first."""

    DEMAND = 0
    AHEAD = 1
    WARM = 2


@dataclass(eq=False)
class Load:
    """One record on its way into a slot."""

    layer: int
    expert: int
    slot: int
    cause: Cause
    is_begun: bool = False
    record: ExpertRecord | None = None
    error: BaseException | None = None
    is_used: bool = False  # somebody asked for it since it was started


@dataclass
class _Queue:
    """Loads by cause, then in the order of their coming. A load may stand in it twice: the second time it is stale."""

    entries: list[tuple[Cause, int, Load]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)

    def push(self, load: Load) -> None:
        heapq.heappush(self.entries, (load.cause, next(self.numbers), load))

    def pop(self) -> Load | None:
        while self.entries:
            cause, _, load = heapq.heappop(self.entries)
            if not load.is_begun and cause is load.cause:
                return load
        return None


class Readers:
    """`n_threads` threads that do `read(load)`, then call `done(load)`.

    All methods but `close`, and the calls of `done` and `idle`, happen under `lock` and within `books`. `idle` is asked
    for a load when the queue is empty. What `read` raises is kept in the load. `arrived` is rung after each `done`.
    """

    def __init__(
        self,
        n_threads: int,
        lock: threading.Lock,
        books: Books,
        *,
        read: Callable[[Load], ExpertRecord],
        done: Callable[[Load], None],
        idle: Callable[[], Load | None],
    ) -> None:
        if n_threads < 1:
            raise ValueError(f"{n_threads} threads to read with")
        self.arrived = Bell()
        self.under_way: list[Load] = []  # loads that are being read
        self._lock, self._books = lock, books
        self._work = threading.Condition(lock)
        self._read, self._done, self._idle = read, done, idle
        self._queue = _Queue()
        self._active_since, self._busy_seconds = 0.0, 0.0
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._loop, name=f"moedock-read-{n}", daemon=True) for n in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy_seconds(self) -> float:
        """Time during which at least one read was under way."""
        return self._busy_seconds + (time.perf_counter() - self._active_since if self.under_way else 0.0)

    def submit(self, load: Load) -> None:
        """Have it read when its turn comes."""
        self._queue.push(load)
        self._work.notify()

    def hurry(self, load: Load, cause: Cause) -> None:
        """Let a load go first that waits for its turn for a lesser cause."""
        if not load.is_begun and cause < load.cause:
            load.cause = cause
            self._queue.push(load)

    def cancel(self, load: Load) -> bool:
        """Take a load out of the queue; False when its read has begun."""
        if load.is_begun:
            return False
        load.is_begun = True  # stale: `pop` passes over it
        return True

    def drop_queue(self) -> None:
        """Give up all reads that have not begun."""
        self._queue = _Queue()

    def close(self) -> None:
        """End the threads; reads under way are finished, others are not begun."""
        with self._lock:
            self._is_closing = True
            self._work.notify_all()
            self.arrived.ring()
        for thread in self._threads:
            thread.join()

    def _loop(self) -> None:
        while True:
            load = self._next()
            if load is None:
                return
            try:
                load.record = self._read(load)
            except BaseException as error:  # raised again by the thread that waits for the record
                load.error = error
            with self._lock, self._books:
                self.under_way.remove(load)
                if not self.under_way:
                    self._busy_seconds += time.perf_counter() - self._active_since
                self._done(load)
                self.arrived.ring()

    def _next(self) -> Load | None:
        """The next load to read; None when it is time to end."""
        with self._lock:
            while not self._is_closing:
                with self._books:
                    load = self._queue.pop() or self._idle()
                    if load is not None:
                        self._begin(load)
                        return load
                self._work.wait()
        return None

    def _begin(self, load: Load) -> None:
        load.is_begun = True
        if not self.under_way:
            self._active_since = time.perf_counter()
        self.under_way.append(load)
