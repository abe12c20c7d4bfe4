"""Opening a container for a command: options from its arguments, notices and progress to stderr."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import runtime
from container.errors import MoedockError, SessionError
from container.progress import BYTES, ProgressReport
from container.publish import obstacle
from runtime import session
from runtime.commands import arguments as shared
from runtime.commands.streams import Streams

if TYPE_CHECKING:
    from runtime.api import OpenModel


@contextlib.contextmanager
def opened(arguments: argparse.Namespace, streams: Streams) -> Iterator[OpenModel]:
    """The container, open until the block ends."""
    progress = _TrunkProgress(streams.err)
    try:
        with contextlib.closing(progress):
            model = runtime.open(
                arguments.container, **shared.opening(arguments), notice=streams.say, progress=progress.update
            )
    except MemoryError:
        raise MoedockError(f"{arguments.container}: not enough memory; its trunk is held in memory as stored") from None
    with model:
        yield model


def check_session(arguments: argparse.Namespace) -> None:
    """Raises SessionError, before the trunk is read, where --session can be neither gone on from nor written."""
    path: Path | None = arguments.session
    if path is None:
        return
    if path.exists():
        session.check(path, identity=session.container_identity(arguments.container), capacity=arguments.ctx)
    reason = obstacle(path)
    if reason is not None:
        raise SessionError(f"{path}: the session cannot be written ({reason})")


def resume(model: OpenModel, path: Path | None) -> None:
    """Go on where the file of a session ends, if there is one. Raises SessionError."""
    if path is not None and path.exists():
        model.load(path)


class _TrunkProgress:
    """How much of the trunk is read; nothing is shown before there is something to show."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._report: ProgressReport | None = None

    def update(self, done_bytes: int, total_bytes: int) -> None:
        if self._report is None:
            self._report = ProgressReport(self._stream, "trunk", [total_bytes], unit=BYTES)
        self._report.update(0, done_bytes / total_bytes)

    def close(self) -> None:
        if self._report is not None:
            self._report.close()
