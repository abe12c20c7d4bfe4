"""Spawned workers: outcomes, errors, deaths; afterwards nobody is left."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

import convert.run
from container.errors import BuildError, WeightError, WorkerError
from convert.options import ConvertOptions
from convert.pool import Watcher, Work, run_work
from convert.threads import map_ahead, worker_threads
from convert.timing import Timing, add_seconds
from tests.convert.pool_tasks import die, fail, sigint_disposition, square


class Recorder:
    def __init__(self) -> None:
        self.outcomes: dict[int, object] = {}
        self.ticks: list[list[int]] = []

    @property
    def watcher(self):
        return Watcher(self.outcomes.__setitem__, lambda slots: self.ticks.append(list(slots)))


def run(function, tasks, n_workers=2, feed=None):
    recorder = Recorder()
    work = Work(function, tasks, [f"task {task}" for task in tasks])
    run_work(work, recorder.watcher, n_workers=n_workers, feed=feed)
    return recorder


class Chain:
    """A feed that gives the last task first, and each other some refusals after the one behind it is done."""

    def __init__(self, n_tasks, n_refusals=0, error=None):
        self.next = n_tasks - 1
        self.n_refusals = self.left_to_refuse = n_refusals
        self.error = error
        self.said = []

    def take(self):
        running = self.said.count("take") > self.said.count("finished")
        if running or self.next < 0:
            return None
        if self.left_to_refuse:
            self.left_to_refuse -= 1
            return None
        if self.error is not None and self.said:
            raise self.error
        self.left_to_refuse = self.n_refusals
        self.said += ["take", self.next]
        self.next -= 1
        return self.said[-1]

    def finished(self, number):
        self.said += ["finished", number]


def test_outcomes_and_progress():
    recorder = run(square, [3, 4, 5])
    assert {number: outcome[0] for number, outcome in recorder.outcomes.items()} == {0: 9, 1: 16, 2: 25}
    assert {outcome[2] for outcome in recorder.outcomes.values()} == {os.getpid()}
    assert len({outcome[1] for outcome in recorder.outcomes.values()} - {os.getpid()}) in (1, 2)
    assert recorder.ticks[-1] == [3, 4, 5]
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("n_refusals", [0, 3])
def test_a_feed_decides_what_starts(n_refusals):
    """While it gives nothing and nothing runs, the watcher still hears."""
    feed = Chain(3, n_refusals)
    recorder = run(square, [3, 4, 5], feed=feed)
    assert {number: outcome[0] for number, outcome in recorder.outcomes.items()} == {0: 9, 1: 16, 2: 25}
    assert list(recorder.outcomes) == [2, 1, 0]
    assert feed.said == ["take", 2, "finished", 2, "take", 1, "finished", 1, "take", 0, "finished", 0]
    assert recorder.ticks.count([0, 0, 0]) >= n_refusals
    assert multiprocessing.active_children() == []


def test_a_feed_hears_of_an_outcome_before_the_watcher():
    """What the watcher then says of it holds already: shards of finished jobs are gone."""
    feed, found = Chain(2), []
    watcher = Watcher(lambda number, _: found.append((number, feed.said[-2:])), lambda _: None)
    run_work(Work(square, [1, 2], ["one", "other"]), watcher, n_workers=1, feed=feed)
    assert found == [(1, ["finished", 1]), (0, ["finished", 0])]


@pytest.mark.parametrize("n_workers", [1, 3])
def test_a_feed_is_asked_for_no_more_than_can_run(n_workers):
    counts = []

    class Counting:
        left = 4
        running = 0

        def take(self):
            if not self.left:
                return None
            self.left -= 1
            self.running += 1
            counts.append(self.running)
            return self.left

        def finished(self, number):
            self.running -= 1

    run(square, [1, 2, 3, 4], n_workers, Counting())
    assert max(counts) == n_workers


def test_an_error_of_the_feed_ends_everything_at_once():
    with pytest.raises(WeightError, match="from the feed"):
        run(square, [3, 4], feed=Chain(2, error=WeightError("from the feed")))
    assert multiprocessing.active_children() == []


def test_workers_ignore_the_terminals_interrupt():
    before = signal.getsignal(signal.SIGINT)
    assert set(run(sigint_disposition, [1, 2]).outcomes.values()) == {True}
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_workers_start_is_not_lost(monkeypatch, number):
    class Struck(ProcessPoolExecutor):
        def submit(self, *arguments):
            future = super().submit(*arguments)
            os.kill(os.getpid(), number)  # between the start of one worker and of the next
            return future

    monkeypatch.setattr("convert.pool.ProcessPoolExecutor", Struck)
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(square, [3, 4])
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert multiprocessing.active_children() == []


def test_a_thread_may_convert_too():
    """Signals are none of its business."""
    found = []
    thread = threading.Thread(target=lambda: found.append(run(square, [2], 1).outcomes[0][0]))
    thread.start()
    thread.join()
    assert found == [4]


@pytest.mark.parametrize(
    ("task", "error", "text"),
    [
        ("weights", WeightError, "row 3 holds NaN"),
        ("disk", OSError, "No space left"),
        ("memory", MemoryError, "Unable to allocate"),
    ],
)
def test_an_error_ends_everything_at_once(task, error, text):
    start = time.monotonic()
    with pytest.raises(error, match=text):
        run(fail, ["other", task])
    assert time.monotonic() - start < 30  # the other task would sleep for a minute
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("task", "how"), [("exit", "exit code 7"), ("segfault", "SIGSEGV"), ("odd", "signal 40")])
def test_a_death_is_reported_with_its_task(task, how):
    start = time.monotonic()
    with pytest.raises(WorkerError) as death:
        run(die, ["other", task])
    assert f"a worker process died ({how}) at work on task {task}; finished layers are kept" in str(death.value)
    assert "task other" not in str(death.value)
    assert time.monotonic() - start < 30
    assert multiprocessing.active_children() == []


def test_an_interrupt_ends_everything_at_once():
    def tick(slots):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_work(Work(fail, ["other"], ["x"]), Watcher(lambda *_: None, tick), n_workers=1)
    assert time.monotonic() - start < 30
    assert multiprocessing.active_children() == []


def test_an_interrupt_while_workers_start_ends_them(monkeypatch):
    """A termination signal may strike inside the start of the pool."""
    real = ProcessPoolExecutor.submit

    def submit(self, function, *arguments):
        if multiprocessing.active_children():
            raise KeyboardInterrupt
        return real(self, function, *arguments)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(fail, ["other", "another"])
    assert time.monotonic() - start < 30
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full"),
        (OSError(errno.EIO, "Input/output error", "/x/y"), "/x/y: Input/output error; run the same command"),
        (MemoryError(), "memory ran out; finished layers are kept, continue with fewer --workers"),
    ],
)
def test_system_errors_become_plain_messages(tmp_path, monkeypatch, k3, error, text):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr(convert.run, "run_work", failing)
    with pytest.raises(BuildError, match=text):
        convert.run.convert(ConvertOptions(source=k3.source, output=tmp_path / "out"), io.StringIO())


def test_mapping_ahead_keeps_order_and_takes_little():
    taken = []

    def items():
        for n in range(10):
            taken.append(n)
            yield n

    with worker_threads(2) as threads:
        results = map_ahead(threads, lambda n: -n, items(), ahead=2)
        assert next(results) == 0
        assert len(taken) == 3
        assert list(results) == [-n for n in range(1, 10)]


def test_mapping_ahead_passes_errors_on():
    def failing(n):
        if n == 3:
            raise WeightError("row 3")
        return n

    with worker_threads(2) as threads, pytest.raises(WeightError, match="row 3"):
        list(map_ahead(threads, failing, range(100), ahead=2))


def test_timing_adds_up():
    timing = Timing()
    for _ in range(3):
        with timing.step("read"):
            time.sleep(0.01)
    with pytest.raises(ValueError, match="x"), timing.step("write"):
        raise ValueError("x")
    assert timing.seconds["read"] >= 0.03
    assert timing.seconds["write"] > 0
    assert timing.seconds["train"] == 0
    total = {"read": 1.0}
    add_seconds(total, {"read": 2.0, "write": 3.0})
    assert total == {"read": 3.0, "write": 3.0}
