"""Files on the loopback hub as the listing names them, and transfers that lose patience in milliseconds."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

from download.listing import RemoteFile
from download.transfer import Patience, Transfer
from tests.hub import Fault, FaultSchedule, Kind, Part, Planned

REPOSITORY = "org/name"
SHARD = "model.safetensors"  # comes by a redirect to the storage
SMALL = "config.json"  # comes from the hub itself
SHARD_BYTES = random.Random(0).randbytes(300_000)
SMALL_BYTES = b'{"a": 1}' * 1000

HASTE = Patience(
    base_seconds=0.002,
    longest_seconds=0.01,
    longest_asked_seconds=0.01,
    give_up_seconds=1.0,
    connect_seconds=1.0,
    stall_seconds=0.3,
)
# For what must succeed, also on a machine that is busy.
STEADY_HASTE = replace(HASTE, give_up_seconds=20)


def small_file(name: str, content: bytes) -> RemoteFile:
    """What the hub's listing says of a file that git holds."""
    digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return RemoteFile(name=name, n_bytes=len(content), git_sha1=digest)


def large_file(name: str, content: bytes) -> RemoteFile:
    """What the hub's listing says of a file in its storage."""
    return RemoteFile(name=name, n_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def hasty(patience: Patience = STEADY_HASTE, max_bytes_per_second: float | None = None) -> Transfer:
    """A transfer for tests, which shows a token."""
    return Transfer(
        headers=lambda: {"Authorization": "Bearer secret"},
        patience=patience,
        seed=0,
        max_bytes_per_second=max_bytes_per_second,
    )


def on_shard(*faults: Fault, first: int = 0) -> FaultSchedule:
    """One fault after the other in the shard's requests to the storage."""
    return FaultSchedule(tuple(Planned(Part.CDN, SHARD, fault, first + n) for n, fault in enumerate(faults)))


def cut_then(fault: Fault, at: int = 100_000) -> FaultSchedule:
    """A first answer that is cut, and a fault in the one that should continue it."""
    return on_shard(Fault(Kind.CUT, at=at), fault)
