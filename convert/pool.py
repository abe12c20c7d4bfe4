"""Spawned worker processes: start them, watch them, and end cleanly whatever happens to one of them.

Progress goes through a plain shared array, one slot a job, with no lock: a worker killed at any moment can
neither corrupt it nor leave the others waiting.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any, Generic, TypeVar

from container.errors import WorkerError
from convert.jobs import Progress, follow_parent

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

POLL_SECONDS = 0.2

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


def run_work(work: Work[Task, Outcome], watcher: Watcher[Outcome], *, n_workers: int) -> None:
    """Run all tasks in spawned processes; returns when all are done.

    Raises what a task raised, first come first; WorkerError, naming the task, when a worker process died.
    In both cases, and on KeyboardInterrupt, every worker has ended before this function is left.
    """
    slots = RawArray("q", 2 * len(work.tasks))  # per task: process id, progress
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(n_workers, mp_context=context, initializer=_start_worker, initargs=(slots,))
    others = multiprocessing.active_children()
    workers: list[BaseProcess] = []
    try:
        # The workers must never see the terminal's Ctrl-C, not even while they start.
        with _interrupts_ignored():
            futures = {
                executor.submit(_run_task, work.function, task, number): number
                for number, task in enumerate(work.tasks)
            }
            workers += _children_but(others)
        _watch(futures, watcher, slots)
    except BrokenProcessPool:
        raise WorkerError(_obituary(workers, slots, work.labels)) from None
    finally:
        for worker in workers or _children_but(others):
            worker.kill()
        executor.shutdown(cancel_futures=True)


def _children_but(others: Sequence[BaseProcess]) -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child not in others]


def _start_worker(slots: Any) -> None:
    global _slots
    _slots = slots
    follow_parent()


def _run_task(function: Callable[[Task, Progress], Outcome], task: Task, number: int) -> Outcome:
    _slots[2 * number] = os.getpid()

    def progress(n_done: int) -> None:
        _slots[2 * number + 1] = n_done

    return function(task, progress)


def _watch(futures: dict[Future[Outcome], int], watcher: Watcher[Outcome], slots: Any) -> None:
    waiting = set(futures)
    while waiting:
        finished, waiting = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        watcher.tick(slots[1::2])
        for future in sorted(finished, key=futures.__getitem__):
            outcome = future.result()
            slots[2 * futures[future]] = 0
            watcher.done(futures[future], outcome)


def _obituary(workers: Sequence[BaseProcess], slots: Any, labels: Sequence[str]) -> str:
    """Who died, how, and at what. The pool itself ends the other workers with SIGTERM, so those are not meant."""
    for worker in workers:
        worker.join(timeout=5)
    busy = {slots[2 * number]: label for number, label in enumerate(labels) if slots[2 * number]}
    dead = [worker for worker in workers if worker.exitcode not in (None, 0, -signal.SIGTERM)] or list(workers)
    what = " and ".join(busy[worker.pid] for worker in dead if worker.pid in busy) or "its start"
    codes = {worker.exitcode for worker in dead if worker.exitcode is not None}
    how = ", ".join(signal.Signals(-code).name if code < 0 else f"exit code {code}" for code in sorted(codes))
    return (
        f"a worker process died ({how}) at work on {what}; finished layers are kept, run the same command to "
        "continue. If it keeps dying, the machine may be short of memory: use fewer --workers"
    )


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only, which is not ours to set up
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
