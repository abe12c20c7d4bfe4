"""Ctrl-C that ends an answer and not the session."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interruptible:
    """While the context lasts, the first Ctrl-C only makes this object, called, return True.

    The model is in the middle of a token then, and finishes it, so that its state stays exact. A second Ctrl-C does
    not wait: it raises KeyboardInterrupt. Outside the main thread, where signals cannot be had, nothing changes.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __call__(self) -> bool:
        """True once Ctrl-C was pressed."""
        return self._asked

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
