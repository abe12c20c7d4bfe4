"""Progress for people: a tqdm bar on a terminal, plain lines now and then in a log. Goes to the stream given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from tqdm import tqdm

LINE_SECONDS = 30.0
BYTES = "B"  # the unit of which lines tell total and rate, too


class ProgressReport:
    """Counts units of work of several tasks, each with its own total."""

    def __init__(
        self, stream: TextIO, title: str, totals: Sequence[int], *, unit: str, unit_scale: float = 1.0
    ) -> None:
        self._stream = stream
        self._title = title
        self._totals = totals
        self._total = sum(totals)
        self._unit = unit
        self._scale = unit_scale
        self._started = self._last_line = time.monotonic()
        self._done = [0] * len(totals)
        self._bar = (
            tqdm(total=self._total * unit_scale, desc=title, unit=unit, unit_scale=True, file=stream, leave=False)
            if stream.isatty()
            else None
        )

    def say(self, line: str) -> None:
        """One whole line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.clear()
        self._stream.write(f"{line}\n")
        self._stream.flush()
        if self._bar is not None:
            self._bar.refresh()

    def update(self, task: int, fraction: float) -> None:
        """Say how much of a task is done, from 0 to 1."""
        before = self._done[task]
        self._done[task] = max(before, int(self._totals[task] * fraction))
        if self._bar is not None:
            self._bar.update((self._done[task] - before) * self._scale)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._line()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def _line(self) -> None:
        self._last_line = time.monotonic()
        done = sum(self._done)
        elapsed = self._last_line - self._started
        left = f", about {duration(elapsed * (self._total - done) / done)} left" if done else ""
        share = 100 * done / self._total if self._total else 100
        total, rate = "", ""
        if self._unit == BYTES:
            total, rate = f" of {size(self._total)}", f", {size(done / elapsed)}/s"
        self.say(f"{self._title}: {share:.1f} %{total} after {duration(elapsed)}{rate}{left}")


def duration(seconds: float) -> str:
    """Seconds as people say them: 45 s, 3 min 20 s, 4 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(n_bytes: float) -> str:
    """Bytes as people say them, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.2f} TiB"
