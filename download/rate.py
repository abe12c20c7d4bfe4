"""A bound on bytes per second that all of a process's transfers share."""

from __future__ import annotations

import threading
import time


class RateLimit:
    """Hands out times: each taker waits until those before it have had theirs, so the sum keeps the bound."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    @property
    def step_bytes(self) -> int:
        """How much to take at a time, so that waits stay short: a quarter of a second's worth."""
        return max(1, int(self._bytes_per_second / 4))

    def take(self, n_bytes: int) -> float:
        """Seconds to wait now that `n_bytes` have come."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + n_bytes / self._bytes_per_second
            return self._free_at - now
