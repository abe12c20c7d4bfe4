"""What a run talks through: the hub and the connections, made from the options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from container.errors import DownloadError
from download.folder import SourceFolder
from download.hub import Hub
from download.ledger import Ledger
from download.mirror import Mirror
from download.options import DownloadOptions
from download.transfer import Transfer


@dataclass(frozen=True)
class Session:
    """The hub, and the transfers of one run."""

    options: DownloadOptions
    hub: Hub
    transfer: Transfer
    stream: TextIO  # for messages

    def say(self, line: str) -> None:
        """One line, at once."""
        self.stream.write(f"{line}\n")
        self.stream.flush()

    def mirror(self, revision: str | None) -> Mirror:
        """The options' folder as a mirror of the repository; says so while the hub gives no answer. Raises HubError."""
        folder = SourceFolder(self.options.folder)
        return Mirror.open(
            self.options.repository,
            revision,
            folder,
            hub=self.hub,
            transfer=self.transfer,
            ledger=Ledger(folder.ledger),
            say=self.say,
        )


@contextlib.contextmanager
def opened(options: DownloadOptions, stream: TextIO) -> Iterator[Session]:
    """A session, closed at the end. Raises DownloadError where the folder's name belongs to something else."""
    if options.folder.exists() and not options.folder.is_dir():
        raise DownloadError(f"{options.folder}: is a file; give a folder, new or of an earlier download")
    hub = Hub(options.endpoint)
    transfer = Transfer(
        headers=hub.headers, patience=options.patience, max_bytes_per_second=options.max_bytes_per_second
    )
    try:
        yield Session(options, hub, transfer, stream)
    finally:
        transfer.stop.set()
        transfer.close()
