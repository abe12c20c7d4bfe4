"""One run at a time in a folder: a lock file that the kernel frees when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from container.errors import BusyError


@contextlib.contextmanager
def held_lock(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` (made, with its folder, when absent) while the block runs.

    Raises BusyError, naming the holder, when another process has it; `what` says what that one is, like "another
    conversion".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink == 0:
                raise BlockingIOError  # the run that held it finished just now and took the folder with it
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise BusyError(
                f"{path.parent.parent}: {what} is running here (process {holder}); wait for it or stop it"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield
