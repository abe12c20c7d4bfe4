"""Spawned worker processes: start them, watch them, and end cleanly whatever happens to one of them.

Progress goes through a plain shared array, one slot a job, with no lock: a worker killed at any moment can
neither corrupt it nor leave the others waiting.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any, Generic, Protocol, TypeVar

from container.errors import WorkerError
from convert.worker import Progress, follow_parent

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

POLL_SECONDS = 0.2
COLLECT_SECONDS = 5.0

# Set in each worker by _start_worker.
_slots: Any = None


@dataclass(frozen=True)
class Work(Generic[Task, Outcome]):
    """Tasks, the function that does one of them in a worker, and what to call each in messages."""

    function: Callable[[Task, Progress], Outcome]
    tasks: Sequence[Task]
    labels: Sequence[str]


@dataclass(frozen=True)
class Watcher(Generic[Outcome]):
    """What the parent is told while the work goes on."""

    done: Callable[[int, Outcome], None]  # number of a task, its outcome
    tick: Callable[[Sequence[int]], None]  # progress of every task, several times a second


class Feed(Protocol):
    """Says which task may start next, and hears which are done."""

    def take(self) -> int | None:
        """The number of a task that may start now, each once; None when there is none now. May raise."""

    def finished(self, number: int) -> None:
        """A task's outcome is here."""


class InOrder:
    """The feed of tasks that can start at any time."""

    def __init__(self, n_tasks: int) -> None:
        self._left = iter(range(n_tasks))

    def take(self) -> int | None:
        """The next."""
        return next(self._left, None)

    def finished(self, number: int) -> None:
        """Nobody waits for it."""


def run_work(work: Work[Task, Outcome], watcher: Watcher[Outcome], *, n_workers: int, feed: Feed | None = None) -> None:
    """Run all tasks in spawned processes, as `feed` lets them start (default: in order); returns when all are done.

    Raises what a task or the feed raised, first come first; WorkerError, naming the task, when a worker process died.
    In both cases, and on KeyboardInterrupt, every worker has ended before this function is left.
    """
    slots = RawArray("q", 2 * len(work.tasks))  # per task: process id, progress
    context = _Workers(n_workers)
    executor = ProcessPoolExecutor(n_workers, mp_context=context, initializer=_start_worker, initargs=(slots,))

    def start(number: int) -> Future[Outcome]:
        with _interrupts_held():
            return executor.submit(_run_task, work.function, work.tasks[number], number)

    try:
        _watch(start, feed or InOrder(len(work.tasks)), watcher, slots, context)
    except BrokenProcessPool:
        raise WorkerError(_obituary(context.started, slots, work.labels)) from None
    finally:
        for worker in context.started:
            worker.kill()
        executor.shutdown(cancel_futures=True)


class _Workers(SpawnContext):
    """Spawns the pool's processes and remembers them, dead ones too."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self._made: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        """Called by the pool for every worker."""
        self._made.append(SpawnProcess(*args, **kwargs))
        return self._made[-1]

    @property
    def started(self) -> list[SpawnProcess]:
        """The workers so far."""
        return [worker for worker in self._made if worker.pid is not None]


def _start_worker(slots: Any) -> None:
    global _slots
    _slots = slots
    follow_parent()


def _run_task(function: Callable[[Task, Progress], Outcome], task: Task, number: int) -> Outcome:
    _slots[2 * number] = os.getpid()

    def progress(n_done: int) -> None:
        _slots[2 * number + 1] = n_done

    return function(task, progress)


def _watch(
    start: Callable[[int], Future[Outcome]], feed: Feed, watcher: Watcher[Outcome], slots: Any, workers: _Workers
) -> None:
    """Start what may start, as many at a time as there are workers, until all is done.

    Raises BrokenProcessPool for a dead worker. The pool alone would not do: it watches a worker that it started late
    only after its next event, which may be the end of a long job (seen with CPython 3.11).
    """
    left = len(slots) // 2
    running: dict[Future[Outcome], int] = {}
    while left:
        while len(running) < workers.most and (number := feed.take()) is not None:
            running[start(number)] = number
        if running:
            finished, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        else:
            time.sleep(POLL_SECONDS)
            finished = set()
        watcher.tick(slots[1::2])
        for future in sorted(finished, key=running.__getitem__):
            outcome = future.result()
            number = running.pop(future)
            slots[2 * number] = 0
            left -= 1
            feed.finished(number)
            watcher.done(number, outcome)
        if left and _dead(workers.started):
            raise BrokenProcessPool


def _dead(workers: Sequence[BaseProcess]) -> list[BaseProcess]:
    """The workers that have ended. While there is work, none does so by itself."""
    ended = wait_for_any([worker.sentinel for worker in workers], timeout=0)
    return [worker for worker in workers if worker.sentinel in ended]


def _obituary(workers: Sequence[BaseProcess], slots: Any, labels: Sequence[str]) -> str:
    """Who died, how, and at what. The pool itself ends the other workers with SIGTERM, so those are not meant."""
    found = {worker.pid: _exit_code(worker) for worker in _dead(workers)}
    busy = {slots[2 * number]: label for number, label in enumerate(labels) if slots[2 * number]}
    dead = {pid: code for pid, code in found.items() if code not in (None, 0, -signal.SIGTERM)} or found
    what = " and ".join(busy[pid] for pid in dead if pid in busy) or "its start"
    how = ", ".join(sorted({_how_it_ended(code) for code in dead.values()}))
    return (
        f"a worker process died ({how}) at work on {what}; finished layers are kept, run the same command to "
        "continue. If it keeps dying, the machine may be short of memory: use fewer --workers"
    )


def _exit_code(worker: BaseProcess) -> int | None:
    """How a dead worker ended. While the pool's thread is collecting the code, there is none for a moment."""
    deadline = time.monotonic() + COLLECT_SECONDS
    while worker.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return worker.exitcode


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """While workers are started, Ctrl-C and SIGTERM wait: either could cut one's start short, and none may be lost.

    SIGINT is blocked besides, which the workers inherit: the terminal's Ctrl-C never reaches them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only, which is not ours to set up
        return
    resource_tracker.ensure_running()  # starting it unblocks SIGINT, so not in between
    held: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _frame: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what waited is taken down now
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for waiting in held:
            signal.raise_signal(waiting)
