"""Session files: the exact state of a sequence, to go on with it later. docs/running.md has the bytes.

A file belongs to one container, whose manifest it names by checksum, and to no context size: of the latent caches it
holds the positions in use. Everything that a read allocates is bounded first by sizes that were checked against the
file's own, and nothing of the state changes before the file's checksum is proved.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from container.errors import FormatError, SessionError
from container.json_object import is_count
from container.layout import MANIFEST_NAME
from container.publish import publishing
from container.strict_json import parse_object
from runtime.text.sampling import Sampler

if TYPE_CHECKING:  # they load compiled code, which checking a file should not wait for
    from runtime.compute.gates import F32
    from runtime.state import SequenceState

MAGIC = b"MOESESS\n"
VERSION = 1
# magic, version, description bytes, number of ids, position, bytes of the arrays, sha256 of the manifest
HEADER = struct.Struct("<8sIIQQQ32s")
CHECKSUM_BYTES = 32  # sha256 of all that stands before it, at the end
MAX_DESCRIPTION_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Session:
    """What a file holds beside the state's arrays."""

    ids: list[int]  # of the whole sequence; those from the state's position on are still to be fed
    turn_start: int | None  # of a chat: where in `ids` the turn begins that is not closed yet
    sampler: dict[str, Any]  # the sampler's random state


def container_identity(folder: Path) -> bytes:
    """What tells one container from another: the sha256 of its manifest, which has checksums of the rest.

    Raises FormatError when it cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({os.strerror(error.errno or 0)})") from None


def check(path: Path, *, identity: bytes, capacity: int) -> None:
    """Raises SessionError for a file that `load` would refuse, as far as its header tells."""
    with _open(path) as file:
        _Header.read(path, file).check(path, identity, capacity)


def save(path: Path, session: Session, state: SequenceState, *, identity: bytes) -> None:
    """Write a session file; it appears whole or not at all. Raises SessionError when it cannot be written."""
    arrays = [array for _, array in state.arrays()]
    description = json.dumps(
        {"turn_start": session.turn_start, "sampler": session.sampler, "arrays": _listed(state)}
    ).encode()
    header = HEADER.pack(
        MAGIC,
        VERSION,
        len(description),
        len(session.ids),
        state.position,
        sum(array.nbytes for array in arrays),
        identity,
    )
    ids = np.array(session.ids, dtype="<u4")
    checksum = hashlib.sha256()
    parts: list[bytes | memoryview] = [header, description, ids.tobytes(), *map(_bytes_of, arrays)]
    try:
        with publishing(path) as file:
            for part in parts:
                checksum.update(part)
                file.write(part)
            file.write(checksum.digest())
    except OSError as error:
        raise SessionError(f"{path}: the session cannot be written ({error.strerror})") from None


def load(path: Path, state: SequenceState, *, identity: bytes, vocab_size: int) -> Session:
    """Put what a session file holds into `state`, and return the rest of it.

    Raises SessionError for a file that is none, damaged, too long for the context or of another container; `state` is
    then as it was. Raises OSError when the disk fails after all that was checked; then `state` must not be used.
    """
    with _open(path) as file:
        header = _Header.read(path, file)
        header.check(path, identity, state.capacity)
        _check_checksum(path, file)
        file.seek(HEADER.size)
        session, listed = _described(path, file.read(header.description_bytes), file.read(4 * header.n_ids))
        if max(session.ids, default=0) >= vocab_size:
            raise SessionError(f"{path}: holds token id {max(session.ids)}, the vocabulary ends at {vocab_size - 1}")
        before = state.position
        state.resume_at(header.position)
        if listed != _listed(state):
            state.resume_at(before)
            raise SessionError(f"{path}: its state has other parts than this version of the runtime keeps")
        for _, array in state.arrays():
            if file.readinto(_bytes_of(array)) != array.nbytes:
                raise OSError(f"{path}: the session file changed while it was read")
    return session


@dataclass(frozen=True)
class _Header:
    description_bytes: int
    n_ids: int
    position: int
    state_bytes: int
    identity: bytes

    @classmethod
    def read(cls, path: Path, file: BufferedReader) -> _Header:
        """Length, magic, version, sizes, in this order. Raises SessionError."""
        packed = file.read(HEADER.size)
        if len(packed) < HEADER.size or not packed.startswith(MAGIC):
            raise SessionError(f"{path}: is no session file")
        _, version, *fields = HEADER.unpack(packed)
        if version != VERSION:
            raise SessionError(f"{path}: is a session file of version {version}, this program reads version {VERSION}")
        header = cls(*fields)
        found = os.fstat(file.fileno()).st_size
        expected = HEADER.size + header.description_bytes + 4 * header.n_ids + header.state_bytes + CHECKSUM_BYTES
        if found != expected:
            raise SessionError(f"{path}: damaged session: {expected} bytes expected, found {found}")
        if header.description_bytes > MAX_DESCRIPTION_BYTES or header.position > header.n_ids:
            raise SessionError(f"{path}: damaged session: its header contradicts itself")
        return header

    def check(self, path: Path, identity: bytes, capacity: int) -> None:
        """Raises SessionError for a session that does not belong to this container, or does not fit."""
        if self.identity != identity:
            raise SessionError(
                f"{path}: the session belongs to another container (manifest {self.identity.hex()[:12]}…, this one "
                f"has {identity.hex()[:12]}…)"
            )
        if self.position > capacity:
            raise SessionError(
                f"{path}: the session has {self.position} positions, the context has room for {capacity}; give --ctx "
                f"{self.position} or more"
            )


def _open(path: Path) -> BufferedReader:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device has no size and no end
            raise SessionError(f"{path}: is no session file")
        return path.open("rb")
    except OSError as error:
        raise SessionError(f"{path}: cannot be read ({os.strerror(error.errno or 0)})") from None


def _check_checksum(path: Path, file: BufferedReader) -> None:
    checksum = hashlib.sha256()
    file.seek(0)
    left = os.fstat(file.fileno()).st_size - CHECKSUM_BYTES
    while left:
        piece = file.read(min(left, _PIECE_BYTES))
        if not piece:
            break
        checksum.update(piece)
        left -= len(piece)
    if file.read(CHECKSUM_BYTES) != checksum.digest():
        raise SessionError(f"{path}: damaged session: its checksum does not match its contents")


def _described(path: Path, description: bytes, ids: bytes) -> tuple[Session, object]:
    """The session, and the list of arrays that follow."""
    try:
        found = parse_object(description)
        turn_start, sampler, listed = found["turn_start"], found["sampler"], found["arrays"]
        Sampler().restore(sampler)
    except (ValueError, KeyError):
        raise SessionError(f"{path}: damaged session: its description is malformed") from None
    if turn_start is not None and not is_count(turn_start, most=len(ids) // 4):
        raise SessionError(f"{path}: damaged session: its description is malformed")
    return Session(np.frombuffer(ids, dtype="<u4").tolist(), turn_start, sampler), listed


def _listed(state: SequenceState) -> list[list[object]]:
    """Name, type and shape of each array, as the description has them."""
    return [[name, array.dtype.str, list(array.shape)] for name, array in state.arrays()]


def _bytes_of(array: F32) -> memoryview:
    """A view of an array's bytes, to be read from or into."""
    assert array.flags.c_contiguous, "a copy would lose what is read into it"
    return array.reshape(-1).view(np.uint8).data
