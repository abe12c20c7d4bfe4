"""Tasks for worker processes. Every worker loads this module, so it imports little."""

from __future__ import annotations

import errno
import os
import signal
import time

from container.errors import WeightError


def square(task, progress):
    progress(task)
    return task * task, os.getpid(), os.getppid()


def fail(task, progress):
    if task == "weights":
        raise WeightError("tensor x: row 3 holds NaN")
    if task == "disk":
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere/trunk.bin")
    if task == "memory":
        import numpy as np  # its error has arguments of its own, which must come through the pipe

        np.empty(1 << 60, dtype=np.uint8)
    time.sleep(60)


def die(task, progress):
    if task == "exit":
        os._exit(7)
    if task == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if task == "odd":
        os.kill(os.getpid(), 40)  # a real-time signal without a name of its own
    time.sleep(60)


def sigint_disposition(task, progress):
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN
