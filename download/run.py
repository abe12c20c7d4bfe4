"""A download from beginning to end: list → prove what is here → room → small files → shards. Resumes by itself."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from container.errors import DownloadError
from container.lock import held_lock
from container.machine import free_disk
from container.progress import size
from download.crew import HaltError, Job, Task, work_through
from download.fetch import GUARD_BYTES
from download.ledger import Ledger
from download.listing import RemoteFile
from download.mirror import Mirror, Progress
from download.options import DownloadOptions
from download.plan import Plan, fetch_choice, make_plan
from download.selection import Choice, is_weights
from download.session import Session, opened

SHOWN_REASONS = 40
SHOWN_NAMES = 10
REFETCH = "what differs is fetched again"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run did."""

    repository: str
    revision: str  # commit
    folder: Path
    n_files: int
    total_bytes: int
    n_fetched: int
    fetched_bytes: int  # in this run
    elapsed_seconds: float
    left_out: tuple[str, ...]  # needed by a conversion, but not asked for
    given_back: tuple[str, ...]  # by a conversion, and so not fetched again

    @property
    def complete(self) -> bool:
        """True when the folder holds all that a conversion needs."""
        return not (self.left_out or self.given_back)

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {"complete": self.complete, **vars(self), "folder": str(self.folder)}


def plan_download(options: DownloadOptions, stream: TextIO) -> Plan:
    """What `download` would do; writes nothing. Raises HubError, TransferError, UsageError."""
    with opened(options, stream) as session:
        mirror = session.mirror(options.revision)
        return make_plan(mirror, fetch_choice(session, mirror), options.min_free_bytes)


def download(options: DownloadOptions, stream: TextIO) -> Summary:
    """Fetch a checkpoint, or what is missing of it, and prove every file. `stream` gets progress and messages.

    Raises HubError, BusyError, UsageError; DownloadError for a disk without room and, once all is there that could
    be fetched, for the files that could not. KeyboardInterrupt passes.
    """
    try:
        with opened(options, stream) as session:
            mirror = session.mirror(options.revision)
            choice = fetch_choice(session, mirror)
            with held_lock(mirror.folder.lock, "another download"):
                mirror.ledger = Ledger(mirror.folder.ledger)  # the run that held the lock may have gone on with it
                return _Run(session, mirror, choice).run()
    except OSError as error:
        raise disk_error(error, options) from error


class _Run:
    """One run, in a folder whose lock is held."""

    def __init__(self, session: Session, mirror: Mirror, choice: Choice) -> None:
        self._session = session
        self._mirror = mirror
        self._choice = choice
        self._options = session.options
        self._started = time.monotonic()

    def run(self) -> Summary:
        """Fetch what is missing. Raises as `download` does."""
        mirror, choice = self._mirror, self._choice
        if mirror.ledger.is_staging:
            raise DownloadError(
                f"{self._options.folder}: is the staging folder of a conversion, which deletes shards in it; choose "
                "another folder"
            )
        self._say_origin()
        remove_stale_parts(mirror)
        min_free_bytes = self._options.min_free_bytes
        wrong = self._prove(make_plan(mirror, choice, min_free_bytes).unproved)
        plan = make_plan(mirror, choice, min_free_bytes, wrong)
        plan.require_room()
        self._say_plan(plan)
        mirror.ledger.say_source(mirror.origin)
        for file in plan.missing:
            if file.name in mirror.ledger.proved:  # at another commit, or it is gone
                mirror.ledger.say_disproved(file.name)
        failures = self._fetch(plan)
        remove_stale_parts(mirror)
        if failures:
            raise _failed(failures, choice, self._options)
        return Summary(
            repository=mirror.listing.repository,
            revision=mirror.listing.commit,
            folder=self._options.folder,
            n_files=len(choice.files),
            total_bytes=choice.n_bytes,
            n_fetched=len(plan.missing),
            fetched_bytes=plan.missing_bytes,
            elapsed_seconds=time.monotonic() - self._started,
            left_out=choice.left_out,
            given_back=choice.given_back,
        )

    def _say_origin(self) -> None:
        before, now = self._mirror.ledger.origin, self._mirror.origin
        if before is None or before == now:
            return
        if before.repository == now.repository:
            wanted = f"{self._options.revision or 'main'} is {self._mirror.listing.commit[:12]} now"
            self._session.say(f"note: the folder was filled from {str(before.revision)[:12]}, and {wanted}: {REFETCH}")
        else:
            self._session.say(f"note: the folder was filled from {before.repository}: {REFETCH}")

    def _say_plan(self, plan: Plan) -> None:
        listing = plan.listing
        self._session.say(
            f"{listing.repository} at {listing.commit[:12]}: {len(plan.choice.files)} files, "
            f"{size(plan.choice.n_bytes)}; {size(plan.present_bytes)} present, {size(plan.missing_bytes)} to fetch, "
            f"{size(plan.free_bytes)} free"
        )

    def _prove(self, files: Sequence[RemoteFile]) -> list[RemoteFile]:
        """Read through files that lie here without a proof. Returns those that are wrong."""

        def prove(file: RemoteFile, progress: Progress) -> None:
            proof = self._mirror.present(file, progress)
            if proof is not None:
                self._mirror.note(proof)
            else:
                wrong.append(file)

        wrong: list[RemoteFile] = []
        self._work([Job(file) for file in files], prove, "proving files that are here")
        for file in wrong:
            self._session.say(f"{file.name}: the file here is not the repository's; fetching it again")
        return wrong

    def _fetch(self, plan: Plan) -> Mapping[str, DownloadError]:
        jobs = [Job(file, plan.part_bytes[file.name]) for file in plan.missing]
        small = [job for job in jobs if not is_weights(job.file.name)]
        failures = self._work(small, self._fetch_one, "small files")
        n_asked = sum(job.n_bytes > 0 for job in small)
        if n_asked and len(failures) == n_asked:
            return failures  # the hub gives us nothing: no use to ask for shards
        shards = [job for job in jobs if is_weights(job.file.name)]
        return {**failures, **self._work(shards, self._fetch_one, "downloading")}

    def _fetch_one(self, file: RemoteFile, progress: Progress) -> None:
        self._mirror.fetch(file, progress, self._guard)

    def _guard(self, missing_bytes: int) -> None:
        """Stop before the disk is full: others write on it too."""
        folder, least = self._options.folder, self._options.min_free_bytes
        free = free_disk(folder)
        if free - min(missing_bytes, GUARD_BYTES) < least:
            raise HaltError(
                f"{folder}: only {size(free)} are free, and {size(least)} are to stay so (--min-free); what was "
                "fetched is kept. Make room and run the same command to continue"
            )

    def _work(self, jobs: Sequence[Job], task: Task, title: str) -> Mapping[str, DownloadError]:
        return work_through(
            jobs,
            task,
            n_threads=self._options.jobs,
            stop=self._session.transfer.stop,
            stream=self._session.stream,
            title=title,
        )


def remove_stale_parts(mirror: Mirror) -> None:
    """Delete parts of files that the repository does not hold any more, what was known of them, and empty folders."""
    parts = mirror.folder.parts
    kept = {
        path for name in mirror.listing.files for path in (mirror.folder.part(name), mirror.folder.part_facts(name))
    }
    everything = [*parts.rglob("*"), *([parts] if parts.is_dir() else [])]
    for path in sorted(everything, reverse=True):  # what is in a folder before the folder
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in kept:
            path.unlink()


def disk_error(error: OSError, options: DownloadOptions) -> DownloadError:
    """An error of the disk in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"{options.folder}: the disk is full ({size(free_disk(options.folder))} free); what was fetched is kept. "
            "Make room and run the same command to continue"
        )
    return DownloadError(
        f"{error.filename or options.folder}: {error.strerror or error}; mend that, then run the same command again"
    )


def _failed(failures: Mapping[str, DownloadError], choice: Choice, options: DownloadOptions) -> DownloadError:
    by_reason: dict[str, list[str]] = {}
    for name, error in failures.items():
        by_reason.setdefault(str(error).removeprefix(f"{name}: "), []).append(name)
    lines = [f"{options.folder}: {len(failures)} of {len(choice.files)} files could not be fetched"]
    lines += [f"  - {shown_names(names)}: {reason}" for reason, names in list(by_reason.items())[:SHOWN_REASONS]]
    if len(by_reason) > SHOWN_REASONS:
        lines.append(f"  … and {len(by_reason) - SHOWN_REASONS} more reasons")
    lines.append("the others are kept; run the same command to try these again")
    return DownloadError("\n".join(lines))


def shown_names(names: Sequence[str]) -> str:
    """A list of files as a message shows it, cut short."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{', '.join(names[:SHOWN_NAMES])}{more}"
