"""Damages bytes of a container at random places, runs it, and says what happened.

    python -m tests.runtime.flips FOLDER SEED N     N places in each file of experts, trunk and codebooks

One JSON object a line, flushed before the next place is damaged, so that a crash of the process names its place. Each
damaged container runs without checks and with `verify`, in chunks and token by token, and is validated.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from container.errors import MoedockError
from container.layout import CODEBOOKS_NAME, EXPERT_HEADER, TRUNK_NAME
from container.reader import ContainerReader
from container.records import CodebookRecord
from runtime.engine import Engine
from runtime.options import RunOptions
from validate.structure import check_structure

IDS = [1, 2, 3]
# Bytes of headers that no reader looks at; a record's crc32 covers what follows the header.
EXPERT_RESERVED = {14, 15, *range(40, EXPERT_HEADER.size)}
SCALES_OFFSET_AND_CRC32 = range(32, 40)  # padding may leave room for scales a little later, which have another crc32
CODEBOOK_HEADER_CHECKED = range(12)

HEADER = "header"  # contradicts what is expected: refused always
CHECKSUM = "checksum"  # refused with `verify`
UNREAD = "unread"  # changes no logit; only `validate` looks at it


@dataclass(frozen=True)
class Outcome:
    """What a damaged byte did."""

    file: str
    offset: int
    guard: str
    where: str
    plain: str  # "same logits", "other logits", or the error
    verified: str  # the same, with `verify`
    n_problems: int  # that `validate` found


def guard_of(reader: ContainerReader, name: str, offset: int) -> tuple[str, str]:
    """What protects a byte, and which part of the file it belongs to."""
    if name == TRUNK_NAME:
        for entry in reader.manifest.trunk:
            if entry.offset <= offset < entry.offset + entry.n_bytes:
                text = entry.name.removeprefix(reader.manifest.tensor_prefix).startswith(("model.", "lm_head."))
                return CHECKSUM if text else UNREAD, entry.name
        return UNREAD, "between tensors"
    if name == CODEBOOKS_NAME:
        inside = offset % CodebookRecord.size(reader.manifest.expert_quant.n_entries)
        return (HEADER if inside in CODEBOOK_HEADER_CHECKED else CHECKSUM), "codebook"
    layout = reader.layout
    inside = offset % layout.stride_bytes
    if inside in EXPERT_RESERVED:
        return UNREAD, f"header byte {inside}"
    if inside < EXPERT_HEADER.size:
        return (CHECKSUM if inside in SCALES_OFFSET_AND_CRC32 else HEADER), f"header byte {inside}"
    covered = inside < layout.scales_offset + layout.scales_bytes
    return (CHECKSUM, "payload") if covered else (UNREAD, "padding")


def run(folder: Path, *, verify: bool) -> bytes | str:
    """The logits' bytes, or the error."""
    try:
        with Engine.open(folder, RunOptions(verify=verify, threads=1, context=16)) as engine:
            state = engine.new_state()
            return b"".join([engine.evaluate(IDS, state=state).logits.tobytes(), engine.step(state, 4).tobytes()])
    except MoedockError as error:
        return f"{type(error).__name__}: {error}"


def said(found: bytes | str, expected: bytes | str) -> str:
    if isinstance(found, str):
        return found
    return "same logits" if found == expected else "other logits"


def outcomes(folder: Path, seed: int, n_places: int) -> Iterator[Outcome]:
    """One after the other; the container is as before in the end."""
    draw = random.Random(seed)
    expected = run(folder, verify=True)
    assert isinstance(expected, bytes), expected
    with ContainerReader.open(folder) as reader:
        banks = sorted(bank.file for bank in reader.manifest.layers.values())
        for name in (banks[0], TRUNK_NAME, CODEBOOKS_NAME):
            path = folder / name
            n_bytes, stride_bytes = path.stat().st_size, reader.layout.stride_bytes
            for n in range(n_places):
                # every fourth place of a bank in a header, which is a small part of it
                in_header = name == banks[0] and n % 4 == 0
                offset = (
                    draw.randrange(n_bytes // stride_bytes) * stride_bytes + draw.randrange(EXPERT_HEADER.size)
                    if in_header
                    else draw.randrange(n_bytes)
                )
                guard, where = guard_of(reader, name, offset)
                with damaged(path, offset, draw.randrange(1, 256)):
                    plain, verified = (said(run(folder, verify=verify), expected) for verify in (False, True))
                    _, findings = check_structure(folder, n_threads=1, stream=io.StringIO())
                yield Outcome(name, offset, guard, where, plain, verified, findings.n_problems)


@contextlib.contextmanager
def damaged(path: Path, offset: int, mask: int) -> Iterator[None]:
    """One byte of a file changed by `mask`, for the length of a block."""
    byte = path.read_bytes()[offset]
    _write(path, offset, byte ^ mask)
    try:
        yield
    finally:
        _write(path, offset, byte)


def _write(path: Path, offset: int, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([byte]))


def main(folder: Path, seed: int, n_places: int) -> None:
    for outcome in outcomes(folder, seed, n_places):
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
