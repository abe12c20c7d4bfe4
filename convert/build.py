"""The output folder while it is being built: whose build it is, who holds it, which jobs are finished.

`OUT/.build/` holds everything that is not yet part of the container: `build.json` (what is being built),
`lock`, trunk.bin in the making, one codebook file and one record per finished job. It vanishes when the
manifest has been published. Every record is published atomically after what it describes is safely on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from container.errors import BuildError, FormatError, MismatchError
from container.layout import BUILD_FOLDER, MANIFEST_NAME, TRUNK_NAME
from container.lock import held_lock
from container.manifest import FileEntry, Manifest
from container.publish import leftovers, publish_bytes, remove_leftovers, sync_folder
from container.strict_json import parse_object
from convert.bank_report import BankFigures
from convert.plan import ConversionPlan, JobPlan
from convert.timing import STEPS

IDENTITY_NAME = "build.json"
LOCK_NAME = "lock"
SHOWN_DIFFERENCES = 20


@dataclass(frozen=True, kw_only=True)
class FinishedJob:
    """The record of a finished job: checksums to prove its output by, and its errors for the report."""

    id: str
    bank: FileEntry | None
    codebooks: FileEntry | None
    trunk_crc32: Mapping[str, int]
    trunk_errors: Mapping[str, float]  # tensor -> ‖w - w'‖ / ‖w‖
    experts: BankFigures | None
    seconds: Mapping[str, float]  # by step, summed over threads; the one thing here that differs from run to run

    def to_json(self) -> dict[str, Any]:
        """The record as it is written."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any], job: JobPlan) -> FinishedJob:
        """Raises KeyError, TypeError or ValueError for anything but `job`'s record as `to_json` wrote it."""
        files = {key: FileEntry(**raw[key]) if raw[key] is not None else None for key in ("bank", "codebooks")}
        figures = raw["experts"] if job.experts is None else BankFigures.from_json(raw["experts"], job.experts)
        record = cls(
            id=raw["id"],
            trunk_crc32=raw["trunk_crc32"],
            trunk_errors=raw["trunk_errors"],
            experts=figures,
            seconds=raw["seconds"],
            **files,
        )
        names = {item.entry.name for item in job.trunk}
        if not (
            record.id == job.id
            and {part is None for part in (record.bank, record.codebooks, record.experts)} == {job.experts is None}
            and _holds(record.trunk_crc32, names, int)
            and _holds(record.trunk_errors, names, float)
            and _holds(record.seconds, set(STEPS), float)
        ):
            raise ValueError(f"not a record of {job.label}")
        return record


class BuildFolder:
    """Paths and records of one output folder. Opened by the parent; workers only use the paths."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output / BUILD_FOLDER
        self.trunk = self.folder / TRUNK_NAME

    def codebooks(self, job_id: str) -> Path:
        """Where a job leaves its codebook records."""
        return self.folder / f"codebooks-{job_id}.bin"

    def record(self, job_id: str) -> Path:
        """Where a job's record is published."""
        return self.folder / f"done-{job_id}.json"

    @property
    def is_complete(self) -> bool:
        """True when the manifest stands: nothing is left to convert."""
        return (self.output / MANIFEST_NAME).exists()

    def problem(self) -> str | None:
        """Why nothing can be built here, or None; creates nothing."""
        output = self.output
        if output.is_symlink() and not output.exists():
            return f"output {output}: is a link to {output.readlink()}, which does not exist"
        existing = next(folder for folder in (output, *output.resolve().parents) if folder.exists())
        if not existing.is_dir():
            return f"output {output}: {existing} is not a folder"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"output {output}: {existing} is not writable"
        if existing == output and not self.is_complete and not (self.folder / IDENTITY_NAME).exists():
            foreign = sorted(path.name for path in output.iterdir() if path.name != BUILD_FOLDER)
            if foreign:
                return (
                    f"output {output}: holds {', '.join(foreign[:3])} and no unfinished build; choose an empty folder"
                )
        return None

    def bytes_present(self, plan: ConversionPlan) -> int:
        """Bytes that already take their room on the disk: of the plan's files, and leftovers that `claim` clears."""
        paths = [self.output / name for name in plan.file_bytes] + [self.trunk]
        paths += [*leftovers(self.output), *leftovers(self.folder)]
        return sum(path.stat().st_size for path in paths if path.is_file())

    def locked(self) -> AbstractContextManager[None]:
        """Hold the folder against other runs. Raises BusyError, naming the holder, when another run is alive here."""
        return held_lock(self.folder / LOCK_NAME, "another conversion")

    def claim(self, identity: dict[str, Any]) -> None:
        """Make this the folder's build, or confirm that it already is. Clears what a killed run left over.

        Raises MismatchError, showing every difference, when the folder belongs to another build.
        """
        self.require_same(identity)
        path = self.folder / IDENTITY_NAME
        if not path.exists():
            publish_bytes(path, _to_bytes(identity))
        for folder in (self.output, self.folder):
            remove_leftovers(folder)
        final = self.output / TRUNK_NAME
        if final.exists() and not self.trunk.exists():
            final.replace(self.trunk)  # killed between publishing the trunk and the manifest
        # shards may be deleted for what is found here: names that a killed run did not come to sync must last, too
        for folder in (self.folder, self.output, self.output.resolve().parent):
            sync_folder(folder)

    def require_same(self, identity: dict[str, Any]) -> None:
        """Raises MismatchError when a container or an unfinished build of another identity is here."""
        if self.is_complete:
            try:
                found = dict(Manifest.read(self.output).provenance)
            except FormatError as error:
                raise BuildError(f"{error}; choose an empty output folder") from None
        elif (self.folder / IDENTITY_NAME).exists():
            found = _read_json(self.folder / IDENTITY_NAME)
        else:
            return
        _require_same(found, identity, self.output)

    def reserve_trunk(self, n_bytes: int) -> None:
        """Create trunk.bin in its full size, so that a full disk shows now and jobs can write their slices."""
        if self.trunk.exists() and self.trunk.stat().st_size == n_bytes:
            return
        with self.trunk.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, n_bytes)
            else:
                file.truncate(n_bytes)
            os.fsync(file.fileno())
        sync_folder(self.folder)

    def read_record(self, job: JobPlan) -> FinishedJob | None:
        """The record of a finished job, None when it is damaged. What it describes is not proved yet."""
        try:
            return FinishedJob.from_json(parse_object(self.record(job.id).read_bytes()), job)
        except (KeyError, TypeError, ValueError):
            return None

    def forget(self, job: JobPlan) -> None:
        """Drop what is left of a job that will run again; its old bank would take the new one's room on the disk."""
        self.record(job.id).unlink(missing_ok=True)
        if job.experts is not None:
            (self.output / job.experts.bank.file).unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the build folder once the container is complete."""
        shutil.rmtree(self.folder)


def _require_same(found: dict[str, Any], wanted: dict[str, Any], output: Path) -> None:
    """Raises MismatchError that lists the keys in which two identities differ."""
    differences = [
        f"  - {key}: there {_brief(old)}, now {_brief(new)}" for key, old, new in _differences(found, wanted)
    ]
    if len(differences) > SHOWN_DIFFERENCES:
        more = len(differences) - SHOWN_DIFFERENCES
        differences = [*differences[:SHOWN_DIFFERENCES], f"  … and {more} more"]
    if differences:
        raise MismatchError(
            f"{output}: begun with other options, library versions or another source; repeat the command as it was "
            "then, or choose another output folder\n" + "\n".join(differences)
        )


def _differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new


def _brief(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return parse_object(path.read_bytes())
    except ValueError:
        raise BuildError(f"{path}: damaged; delete {path.parent} to start this conversion anew") from None


def _holds(values: Any, keys: set[str], kind: type) -> bool:
    return (
        isinstance(values, dict)
        and set(values) == keys
        and all(type(value) is kind for value in values.values())
        and min(values.values(), default=0) >= 0
    )


def _to_bytes(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def publish_record(path: Path, record: FinishedJob) -> None:
    """Publish a job's record: from now on the job counts as finished."""
    publish_bytes(path, _to_bytes(record.to_json()))
