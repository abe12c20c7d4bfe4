"""What a download would do: which files are there, which are missing, and whether the disk has room for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from container.errors import DownloadError
from container.machine import free_disk
from container.progress import size
from download.crew import Job, work_through
from download.listing import Listing, RemoteFile
from download.mirror import Mirror, Progress
from download.selection import Choice, choose, index_file
from download.session import Session


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen files by what has to be done with them, in the order of fetching."""

    listing: Listing
    folder: Path
    choice: Choice
    proved: tuple[RemoteFile, ...]  # nothing to do
    unproved: tuple[RemoteFile, ...]  # there with the right size: to be read through
    missing: tuple[RemoteFile, ...]
    part_bytes: Mapping[str, int]  # of missing files that an earlier run began
    free_bytes: int
    min_free_bytes: int  # to stay free

    @property
    def missing_bytes(self) -> int:
        """Bytes still to be fetched, and to find room for."""
        return sum(file.n_bytes - self.part_bytes[file.name] for file in self.missing)

    @property
    def present_bytes(self) -> int:
        """Bytes on disk, those of unfinished files included."""
        return sum(file.n_bytes for file in (*self.proved, *self.unproved)) + sum(self.part_bytes.values())

    @property
    def shortage(self) -> str | None:
        """What the disk lacks for all missing bytes, in words; None when it has the room."""
        if not self.missing_bytes or self.missing_bytes + self.min_free_bytes <= self.free_bytes:
            return None
        return (
            f"{self.folder}: {size(self.missing_bytes)} are still to be fetched and {size(self.min_free_bytes)} are to "
            f"stay free (--min-free), but only {size(self.free_bytes)} are free ({size(self.present_bytes)} are "
            "present)"
        )

    def require_room(self) -> None:
        """Raises DownloadError where the disk has no room for all missing bytes."""
        if self.shortage is not None:
            raise DownloadError(
                f"{self.shortage}; make room or give a folder on a larger disk. `python -m convert hf://"
                f"{self.listing.repository}` needs no room for the whole checkpoint"
            )

    def to_json(self) -> dict[str, Any]:
        """For --dry-run --json."""
        return {
            "repository": self.listing.repository,
            "revision": self.listing.commit,
            "folder": str(self.folder),
            "n_files": len(self.choice.files),
            "total_bytes": self.choice.n_bytes,
            "present_bytes": self.present_bytes,
            "missing_bytes": self.missing_bytes,
            "free_bytes": self.free_bytes,
            "problems": [self.shortage] if self.shortage else [],
            "files": [
                {"name": file.name, "bytes": file.n_bytes, "present_bytes": self.present_of(file)}
                for file in self.choice.files
            ],
            "left_out": list(self.choice.left_out),
            "given_back": list(self.choice.given_back),
        }

    def present_of(self, file: RemoteFile) -> int:
        """Bytes of a chosen file that are on disk."""
        return self.part_bytes.get(file.name, file.n_bytes)


def choice_of(session: Session, mirror: Mirror) -> Choice:
    """The files that the options ask for; reads the index. Raises HubError, TransferError, UsageError."""
    small = mirror.small_files()
    index = index_file(mirror.listing)
    if index is not None:  # by a thread, so that its progress, or a line that is dead, shows
        failures = work_through(
            [Job(index)],
            lambda file, progress: _read_index(mirror, progress),
            n_threads=1,
            stop=session.transfer.stop,
            stream=session.stream,
            title="reading the index",
        )
        if failures:
            raise failures[index.name]
    return choose(
        mirror.listing, (*small, *mirror.shards()), include=session.options.include, exclude=session.options.exclude
    )


def fetch_choice(session: Session, mirror: Mirror) -> Choice:
    """The files to fetch: those that a conversion has given back only where they are asked for by name."""
    choice = choice_of(session, mirror)
    gone = [] if session.options.include else [file for file in choice.files if mirror.is_given_back(file)]
    return Choice(
        files=tuple(file for file in choice.files if file not in gone),
        left_out=choice.left_out,
        given_back=tuple(file.name for file in gone),
    )


def _read_index(mirror: Mirror, progress: Progress) -> None:
    mirror.index(progress)


def make_plan(mirror: Mirror, choice: Choice, min_free_bytes: int, wrong: Collection[RemoteFile] = ()) -> Plan:
    """How the folder stands now, its `wrong` files being as good as missing; reads no file's content."""
    proved, unproved, missing = [], [], []
    known_wrong = {file.name for file in wrong}
    for file in choice.files:
        if mirror.is_proved(file):
            proved.append(file)
        elif file.name not in known_wrong and mirror.has_size(file):
            unproved.append(file)
        else:
            missing.append(file)
    return Plan(
        listing=mirror.listing,
        folder=mirror.folder.folder,
        choice=choice,
        proved=tuple(proved),
        unproved=tuple(unproved),
        missing=tuple(missing),
        part_bytes={file.name: mirror.part_bytes(file) for file in missing},
        free_bytes=free_disk(mirror.folder.folder),
        min_free_bytes=min_free_bytes,
    )
