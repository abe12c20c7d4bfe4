"""Every error moedock raises on purpose, in one tree.

    MoedockError                 exit 1; its text is one complete message for a person
    ├── UsageError               exit 2; the command line makes no sense
    ├── SourceError              the checkpoint cannot be used
    │   ├── ConfigError          config.json is missing, malformed or describes what we do not support
    │   ├── ShardError           a safetensors file is missing, truncated or malformed
    │   └── WeightError          a weight is NaN or infinite
    ├── PreflightError           several problems at once, one line each
    ├── FormatError              a container's bytes do not follow docs/FORMAT.md
    │   └── IntegrityError       well-formed bytes whose checksum does not match
    ├── BusyError                another run holds the folder
    ├── DownloadError            a checkpoint cannot be fetched
    │   ├── HubError             the hub does not give the repository, the revision or a file
    │   └── TransferError        a file's bytes do not arrive, or arrive wrong
    ├── BuildError               the output folder cannot be (or could not be) built in
    │   ├── MismatchError        the folder belongs to a run with other options, seed or source
    │   └── WorkerError          a worker process died
    ├── SessionError             a session file cannot be used
    └── CheckError               a comparison could not be carried out

A message names the file and the tensor, layer or expert, what was expected and what was found, and what
to do next. Only `__main__` modules turn an error into an exit code.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200


def shown(value: object) -> str:
    """`value` as a message shows it: cut short, since a hostile file's values may be huge or deeply nested."""
    return _REPR.repr(value)


class MoedockError(Exception):
    """Base of all deliberate errors; `str(error)` is the message shown to the user."""

    exit_code = 1


class UsageError(MoedockError):
    """Arguments that make no sense together."""

    exit_code = 2


class SourceError(MoedockError):
    """The checkpoint cannot be used."""


class ConfigError(SourceError):
    """config.json is missing, malformed or describes something unsupported."""


class ShardError(SourceError):
    """A safetensors file is missing, truncated or malformed."""


class WeightError(SourceError):
    """A weight is NaN or infinite."""


class PreflightError(MoedockError):
    """Everything that stands against a conversion, found before the first byte is written."""

    def __init__(self, problems: Sequence[str], *, shown: int = 40) -> None:
        self.problems = list(problems)
        lines = [f"cannot convert: {len(self.problems)} problem(s) found, nothing was written"]
        lines += [f"  - {problem}" for problem in self.problems[:shown]]
        if len(self.problems) > shown:
            lines.append(f"  … and {len(self.problems) - shown} more")
        super().__init__("\n".join(lines))


class FormatError(MoedockError):
    """A container's bytes do not follow docs/FORMAT.md."""


class IntegrityError(FormatError):
    """Well-formed bytes whose checksum does not match."""


class BusyError(MoedockError):
    """Another run holds the folder."""


class DownloadError(MoedockError):
    """A checkpoint cannot be fetched."""


class HubError(DownloadError):
    """The hub does not give the repository, the revision or a file."""


class TransferError(DownloadError):
    """A file's bytes do not arrive, or arrive wrong."""


class BuildError(MoedockError):
    """The output folder cannot be built in."""


class MismatchError(BuildError):
    """The output folder belongs to a run with other options, seed or source."""


class WorkerError(BuildError):
    """A worker process died or failed."""


class SessionError(MoedockError):
    """A session file cannot be used."""


class CheckError(MoedockError):
    """A comparison could not be carried out."""
