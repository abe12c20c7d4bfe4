"""Bookkeeping shared by threads, one of which may be interrupted by Ctrl-C between any two steps of it.

KeyboardInterrupt is raised in the main thread alone, wherever that is. What it cuts short is not undone but noted, and
whoever comes next brings the books in order before using them. So nothing has to be done on the way out, where the
next interrupt may strike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from container.errors import MoedockError


class Books:
    """`with lock, books:` surrounds every change of what `lock` guards; `repair` makes it sound again.

    `repair` must be good for any state that an interrupt leaves, its own included. A MoedockError or a ValueError is
    raised on purpose, between changes: after any other exception there is something to repair.
    """

    def __init__(self, repair: Callable[[], None]) -> None:
        self._repair = repair
        self._is_sound = True

    def __enter__(self) -> None:
        if not self._is_sound:
            self._repair()
        self._is_sound = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_sound = kind is None or issubclass(kind, (MoedockError, ValueError))


class Bell:
    """Wakes one thread that listens. A condition would do, but that an interrupted wait may leave its lock to others.

    `silence` and `ring` happen under the lock of what the listener waits for, `wait` without it: silence the bell, look
    whether there is anything, and wait if not. Then no ring is missed.
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()  # locked: nothing to wake up for
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the listener, now or when it waits."""
        if self._silent.locked():
            self._silent.release()

    def silence(self) -> None:
        """Forget that the bell was rung."""
        self._silent.acquire(blocking=False)

    def wait(self) -> None:
        """Return when the bell is rung, or was since it was silent."""
        self._silent.acquire()
