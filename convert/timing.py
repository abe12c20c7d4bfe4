"""Seconds per step of the work, summed over threads: what the summary and the benchmark show as shares."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping

STEPS = ("read", "dequantise", "train", "encode", "write")


class Timing:
    """Adds up seconds by step; threads may share one."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(STEPS, 0.0)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count the block's wall time under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[name] += time.perf_counter() - start

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds so far, by step."""
        return dict(self._seconds)


def add_seconds(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add one job's seconds to a total."""
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + seconds
