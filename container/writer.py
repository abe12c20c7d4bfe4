"""Writing an expert bank: records appended in order, published when the last one is in."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from container.manifest import FileEntry
from container.publish import publishing
from container.records import ExpertRecord, RecordLayout


class BankWriter:
    """A context manager that publishes `path` only when all `n_experts` records were appended in order.

    Leaving the block early, or with an exception, leaves nothing behind under the final name.
    """

    def __init__(self, path: Path, layout: RecordLayout, *, n_experts: int) -> None:
        self.path = path
        self.layout = layout
        self.n_experts = n_experts
        self._n_written = 0
        self._sha256 = hashlib.sha256()
        self._stack = contextlib.ExitStack()
        self._file: BinaryIO | None = None

    def __enter__(self) -> BankWriter:
        self._file = self._stack.enter_context(publishing(self.path))
        return self

    def append(self, record: ExpertRecord) -> None:
        """Write the next expert's record. Raises ValueError when it is out of turn."""
        if self._file is None or record.expert != self._n_written or self._n_written >= self.n_experts:
            raise ValueError(f"{self.path}: expert {record.expert} is out of turn, expected {self._n_written}")
        data = record.pack(self.layout)
        self._file.write(data)
        self._sha256.update(data)
        self._n_written += 1

    @property
    def entry(self) -> FileEntry:
        """Size and checksum of what was written so far."""
        return FileEntry(n_bytes=self._n_written * self.layout.stride_bytes, sha256=self._sha256.hexdigest())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._n_written != self.n_experts:
            error = ValueError(f"{self.path}: {self._n_written} of {self.n_experts} records written")
            with contextlib.suppress(ValueError):
                self._stack.__exit__(type(error), error, None)
            raise error
        self._stack.__exit__(kind, error, trace)
