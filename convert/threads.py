"""Threads of one worker process. Every kernel runs on one thread; parallelism is over strips and matrices only,
so that results do not depend on the number of threads and cores are never oversubscribed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import faiss

Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_threads(n_threads: int) -> ThreadPoolExecutor:
    """A pool whose threads call faiss single-threaded; OpenMP's thread count is a setting of each thread."""
    return ThreadPoolExecutor(n_threads, initializer=faiss.omp_set_num_threads, initargs=(1,))


def map_ahead(
    threads: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item], *, ahead: int
) -> Iterator[Result]:
    """Results in order, with at most `ahead` items taken from `items` beyond the one being waited for."""
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(threads.submit(function, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
