"""`--check`: a folder, whoever filled it, compared with what the repository lists. Removes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from container.errors import DownloadError
from container.lock import held_lock
from download.crew import Job, work_through
from download.folder import SourceFolder
from download.ledger import Ledger
from download.listing import RemoteFile
from download.mirror import Mirror, Progress
from download.options import Check, DownloadOptions
from download.plan import choice_of
from download.session import Session, opened


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found."""

    repository: str
    revision: str  # commit
    folder: Path
    check: Check
    n_files: int
    total_bytes: int
    problems: tuple[str, ...]  # one line for each file that is not right
    left_out: tuple[str, ...]  # needed by a conversion, but not looked at
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {"right": not self.problems, **vars(self), "folder": str(self.folder), "check": self.check.value}


def audit(options: DownloadOptions, stream: TextIO) -> Audit:
    """Compare every chosen file's size, or checksum, with the listing; links are followed.

    Proofs, and proofs that do not hold, go into the ledger where the folder can be written. Without a revision the
    commit counts that the ledger names. Raises HubError, BusyError, DownloadError.
    """
    if not options.folder.is_dir():
        raise DownloadError(f"{options.folder}: no such folder, so there is nothing to check")
    with opened(options, stream) as session:
        mirror = session.mirror(options.revision or _own_revision(options))
        notes: list[str] = []
        with _lock(options, notes):
            mirror.ledger = Ledger(mirror.folder.ledger)  # the run that held the lock may have gone on with it
            return _Audit(session, mirror, writes=not notes).run(notes)


def _own_revision(options: DownloadOptions) -> str | None:
    """The commit that the folder says it holds: its ledger or, in the hub library's cache, its name."""
    origin = Ledger(SourceFolder(options.folder).ledger).origin
    if origin is not None and origin.repository == options.repository:
        return origin.revision
    folder = options.folder.resolve()
    return folder.name if folder.parent.name == "snapshots" else None


@contextlib.contextmanager
def _lock(options: DownloadOptions, notes: list[str]) -> Iterator[None]:
    """Hold the folder's lock if something may be written; where it cannot be, a note says so."""
    with contextlib.ExitStack() as stack:
        if options.check is Check.SHA256:
            try:
                stack.enter_context(held_lock(SourceFolder(options.folder).lock, "another download"))
            except OSError as error:
                notes.append(f"{options.folder} cannot be written ({error.strerror}): what was proved is noted nowhere")
        yield


class _Audit:
    def __init__(self, session: Session, mirror: Mirror, *, writes: bool) -> None:
        self._session = session
        self._mirror = mirror
        self._options = session.options
        self._writes = writes
        self._problems: dict[str, str] = {}

    def run(self, notes: list[str]) -> Audit:
        choice = choice_of(self._session, self._mirror)
        given_back = [file for file in choice.files if self._mirror.is_given_back(file)]
        if given_back:
            into = self._mirror.ledger.reclaimed[given_back[0].name].into
            notes.append(f"{len(given_back)} shard(s) were given back after their conversion into {into}")
        for file in choice.files:
            problem = None if file in given_back else self._outside(file)
            if problem is not None:
                self._problems[file.name] = problem
        if self._options.check is Check.SHA256:
            self._compare([file for file in choice.files if file not in given_back])
        order = [file.name for file in choice.files]
        return Audit(
            repository=self._mirror.listing.repository,
            revision=self._mirror.listing.commit,
            folder=self._options.folder,
            check=self._options.check or Check.SIZE,
            n_files=len(choice.files),
            total_bytes=choice.n_bytes,
            problems=tuple(f"{name}: {self._problems[name]}" for name in order if name in self._problems),
            left_out=choice.left_out,
            notes=tuple(notes),
        )

    def _outside(self, file: RemoteFile) -> str | None:
        """What is wrong with a file as it looks from outside."""
        path = self._mirror.folder.file(file.name)
        if not path.exists():
            begun = self._mirror.part_bytes(file)
            missing = f"missing ({begun:,} of {file.n_bytes:,} bytes are begun)" if begun else "missing"
            return f"a link to {path.readlink()}, where nothing is" if path.is_symlink() else missing
        if not path.is_file():
            return "not a file"
        found = path.stat().st_size
        return None if found == file.n_bytes else f"{found:,} bytes, expected {file.n_bytes:,}"

    def _compare(self, files: list[RemoteFile]) -> None:
        if self._writes:
            self._mirror.ledger.say_source(self._mirror.origin)
            for file in files:
                if file.name in self._problems:
                    self._disprove(file)
        work_through(
            [Job(file) for file in files if file.name not in self._problems],
            self._compare_one,
            n_threads=self._options.jobs,
            stop=self._session.transfer.stop,
            stream=self._session.stream,
            title="comparing checksums",
        )

    def _compare_one(self, file: RemoteFile, progress: Progress) -> None:
        try:
            proof, wrong = self._mirror.prove(file, progress)
        except OSError as error:
            proof, wrong = None, f"cannot be read ({error.strerror or error})"
        if wrong is not None:
            self._problems[file.name] = wrong
        if not self._writes:
            return
        if proof is None:
            self._disprove(file)
        else:
            self._mirror.note(proof)

    def _disprove(self, file: RemoteFile) -> None:
        if file.name in self._mirror.ledger.proved:
            self._mirror.ledger.say_disproved(file.name)
