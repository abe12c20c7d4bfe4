"""What every worker process begins with, before it loads what its tasks need."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import wait

Progress = Callable[[int], None]  # told how much of a task is done


def follow_parent() -> None:
    """Set a worker process up: it ignores Ctrl-C (the parent decides) and dies at once when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()


def _die_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
