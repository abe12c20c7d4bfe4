"""One file from its part to its final place: resumed at the byte, begun anew where it must be, proved in the end."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.errors import HubError, TransferError
from download.fetch import GUARD_BYTES, fetch_file, unguarded
from download.folder import SourceFolder
from download.hashing import Digests
from download.ledger import Proof
from download.listing import RemoteFile
from download.transfer import Stopped, Transfer
from tests.download.served import (
    HASTE,
    REPOSITORY,
    SHARD,
    SHARD_BYTES,
    SMALL,
    SMALL_BYTES,
    cut_then,
    hasty,
    large_file,
    on_shard,
    small_file,
)
from tests.hub import Fault, FaultSchedule, HubServer, Kind, Part, Planned

SHARD_FILE = large_file(SHARD, SHARD_BYTES)
SMALL_FILE = small_file(SMALL, SMALL_BYTES)
NESTED = "inference/deep/model.py"
PROOF = Proof(SHARD, len(SHARD_BYTES), hashlib.sha256(SHARD_BYTES).hexdigest())


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.allow("secret")
        server.add(REPOSITORY, {SHARD: SHARD_BYTES, SMALL: SMALL_BYTES, NESTED: b"x = 1\n", "empty.py": b""})
        yield server


class Run:
    """Fetches files of one hub into one folder, and remembers what it was told."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.hub = hub
        self.folder = SourceFolder(folder)
        self.told: list[int] = []
        self.guarded: list[int] = []

    def __call__(self, file: RemoteFile = SHARD_FILE, transfer: Transfer | None = None) -> Proof:
        transfer = transfer or hasty()
        url = f"{self.hub.endpoint}/{REPOSITORY}/resolve/main/{file.name}"
        try:
            return fetch_file(transfer, url, file, self.folder, progress=self.told.append, guard=self.guarded.append)
        finally:
            transfer.close()

    def starts(self, part: Part = Part.CDN, name: str = SHARD) -> list[int | None]:
        return [one.range_start for one in self.hub.of(name, part)]

    def left_in_state(self) -> list[str]:
        return [path.name for path in self.folder.state.rglob("*") if path.is_file()]

    def stop_after(self, n_bytes: int) -> None:
        """A first run that ends with `n_bytes` in its part, as a kill might leave it."""
        self.hub.set_faults(on_shard(Fault(Kind.STALL, at=n_bytes)))
        transfer = hasty()

        def progress(n: int) -> None:
            if n == n_bytes:
                transfer.stop.set()

        url = f"{self.hub.endpoint}/{REPOSITORY}/resolve/main/{SHARD}"
        with pytest.raises(Stopped):
            fetch_file(transfer, url, SHARD_FILE, self.folder, progress=progress)
        transfer.close()
        assert self.folder.part(SHARD).read_bytes() == SHARD_BYTES[:n_bytes]
        assert not self.folder.file(SHARD).exists()
        self.hub.set_faults(FaultSchedule())
        self.hub.clear()


@pytest.fixture
def run(hub: HubServer, tmp_path: Path) -> Run:
    return Run(hub, tmp_path / "model")


def test_a_shard(run: Run) -> None:
    assert run() == PROOF
    assert run.folder.file(SHARD).read_bytes() == SHARD_BYTES
    assert run.starts() == [None]
    assert run.told == sorted(run.told)
    assert run.told[-1] == len(SHARD_BYTES)
    assert run.guarded == [len(SHARD_BYTES)]
    assert run.left_in_state() == []


@pytest.mark.parametrize(
    ("name", "content"),
    [(SMALL, SMALL_BYTES), (NESTED, b"x = 1\n"), ("empty.py", b"")],
    ids=["small", "nested", "empty"],
)
def test_a_file_that_git_holds(run: Run, name: str, content: bytes) -> None:
    assert run(small_file(name, content)) == Proof(name, len(content), hashlib.sha256(content).hexdigest())
    assert run.folder.file(name).read_bytes() == content
    assert run.left_in_state() == []


@pytest.mark.parametrize("n_bytes", [1, 65_536, 299_999])
def test_a_stopped_run_is_continued_at_the_byte(run: Run, n_bytes: int) -> None:
    run.stop_after(n_bytes)
    assert run() == PROOF
    assert run.folder.file(SHARD).read_bytes() == SHARD_BYTES
    assert run.starts() == [n_bytes]
    assert [one.bytes_sent for one in run.hub.of(SHARD, Part.CDN)] == [len(SHARD_BYTES) - n_bytes]
    assert run.told[0] == n_bytes
    assert run.guarded == [len(SHARD_BYTES) - n_bytes]


def test_a_part_that_is_whole_is_not_asked_for(run: Run) -> None:
    run.stop_after(299_999)
    with run.folder.part(SHARD).open("ab") as part:
        part.write(SHARD_BYTES[-1:])
    assert run() == PROOF
    assert run.hub.requests == []
    assert run.guarded == []


def test_a_cut_is_continued_at_the_byte(run: Run) -> None:
    run.hub.set_faults(on_shard(*[Fault(Kind.CUT, at=70_000)] * 3))
    assert run() == PROOF
    assert run.starts() == [None, 70_000, 140_000, 210_000]


ANEW: list[tuple[str, Fault, list[int | None]]] = [
    ("whole file", Fault(Kind.IGNORE_RANGE), [None, 100_000]),
    ("other start", Fault(Kind.RANGE_START, at=1), [None, 100_000, None]),
    ("earlier start", Fault(Kind.RANGE_START, at=-1), [None, 100_000, None]),
    ("other total", Fault(Kind.RANGE_TOTAL, at=1), [None, 100_000, None]),
    ("no such range", Fault(Kind.STATUS, status=416), [None, 100_000, None]),
]


@pytest.mark.parametrize(("fault", "starts"), [case[1:] for case in ANEW], ids=[case[0] for case in ANEW])
def test_what_makes_it_begin_anew(run: Run, fault: Fault, starts: list[int | None]) -> None:
    run.hub.set_faults(cut_then(fault))
    assert run() == PROOF
    assert run.folder.file(SHARD).read_bytes() == SHARD_BYTES
    assert run.starts() == starts
    assert any(later < earlier for earlier, later in zip(run.told, run.told[1:], strict=False))


def test_another_etag_makes_it_begin_anew(run: Run) -> None:
    run.hub.set_faults(
        FaultSchedule((*cut_then(Fault(Kind.ETAG)).planned, Planned(Part.HUB, SHARD, Fault(Kind.ETAG), 1)))
    )
    assert run() == PROOF
    assert run.starts() == [None, 100_000, None]


def test_another_etag_of_the_storage_alone_does_not(run: Run) -> None:
    run.hub.set_faults(cut_then(Fault(Kind.ETAG)))
    assert run() == PROOF
    assert run.starts() == [None, 100_000]


GOES_ON: list[tuple[str, Fault]] = [
    ("length short", Fault(Kind.LENGTH_SHORT, at=7)),
    ("length long", Fault(Kind.LENGTH_LONG, at=7)),
    ("gzip", Fault(Kind.GZIP)),
    ("expired", Fault(Kind.EXPIRE)),
    ("busy", Fault(Kind.STATUS, status=503, seconds=0)),
    ("drop", Fault(Kind.DROP)),
    ("stalled headers", Fault(Kind.STALL_HEADERS)),
]


@pytest.mark.parametrize("fault", [fault for _, fault in GOES_ON], ids=[name for name, _ in GOES_ON])
def test_what_leaves_the_bytes_that_are_here(run: Run, fault: Fault) -> None:
    run.hub.set_faults(cut_then(fault))
    assert run() == PROOF
    assert run.folder.file(SHARD).read_bytes() == SHARD_BYTES
    assert run.starts() == [None, 100_000, 100_000]
    assert run.told == sorted(run.told)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Kind.SURPLUS, at=7),
        Fault(Kind.SURPLUS, at=100_000),
        Fault(Kind.SILENT_CUT, at=70_000),
        Fault(Kind.CHUNKED_CUT, at=70_000),
        Fault(Kind.CUT, at=70_000, reset=True),
    ],
    ids=str,
)
def test_bytes_before_the_fault_may_be_kept(run: Run, fault: Fault) -> None:
    run.hub.set_faults(cut_then(fault))
    assert run() == PROOF
    assert run.folder.file(SHARD).read_bytes() == SHARD_BYTES
    assert all(n <= len(SHARD_BYTES) for n in run.told)


OTHER_FACTS = ["missing", "garbage", "a list", "size", "sha256", "git_sha1", "etag", "another key"]


@pytest.mark.parametrize("change", OTHER_FACTS)
def test_a_part_of_another_file_is_not_continued(run: Run, change: str) -> None:
    run.stop_after(100_000)
    path = run.folder.part_facts(SHARD)
    facts = json.loads(path.read_bytes())
    assert facts == {"bytes": 300_000, "sha256": SHARD_FILE.sha256, "git_sha1": None, "etag": SHARD_FILE.sha256}
    if change == "missing":
        path.unlink()
    elif change in {"garbage", "a list"}:
        path.write_text('{"bytes": ' if change == "garbage" else "[1]")
    else:
        key = {"size": "bytes", "another key": "more"}.get(change, change)
        path.write_text(json.dumps({**facts, key: 1 if key == "bytes" else "0"}))
    assert run() == PROOF
    assert run.folder.file(SHARD).read_bytes() == SHARD_BYTES
    assert run.starts() == ([100_000, None] if change == "etag" else [None])


def test_a_part_that_is_too_long_begins_anew(run: Run) -> None:
    run.stop_after(299_999)
    with run.folder.part(SHARD).open("ab") as part:
        part.write(b"ab")
    assert run() == PROOF
    assert run.starts() == [None]


def test_another_revision_of_a_file_begins_anew(run: Run) -> None:
    run.stop_after(100_000)
    changed = random.Random(1).randbytes(300_000)
    run.hub.add(REPOSITORY, {SHARD: changed})
    run(large_file(SHARD, changed))
    assert run.folder.file(SHARD).read_bytes() == changed
    assert run.starts() == [None]


def test_a_damaged_part_is_fetched_anew(run: Run) -> None:
    run.stop_after(100_000)
    run.folder.part(SHARD).write_bytes(bytes(100_000))
    assert run() == PROOF
    assert run.folder.file(SHARD).read_bytes() == SHARD_BYTES
    assert run.starts() == [100_000, None]


@pytest.mark.parametrize("damaged_part", [False, True])
def test_a_wrong_byte_is_fetched_anew_once(run: Run, damaged_part: bool) -> None:
    if damaged_part:  # of an earlier run: it takes nothing from what this one tries
        run.stop_after(1000)
        run.folder.part(SHARD).write_bytes(bytes(1000))
    run.hub.set_faults(on_shard(Fault(Kind.FLIP, at=299_000), first=int(damaged_part)))
    assert run() == PROOF
    assert run.folder.file(SHARD).read_bytes() == SHARD_BYTES
    assert run.starts() == [*([1000] if damaged_part else []), None, None]


def test_wrong_bytes_twice_are_named_and_removed(run: Run) -> None:
    run.hub.set_faults(on_shard(Fault(Kind.FLIP, at=5), Fault(Kind.FLIP, at=5)))
    wrong = hashlib.sha256(SHARD_BYTES[:5] + bytes([SHARD_BYTES[5] ^ 0xFF]) + SHARD_BYTES[6:]).hexdigest()
    with pytest.raises(TransferError) as caught:
        run()
    assert str(caught.value).startswith(
        f"{SHARD}: its sha256 is {wrong} where the repository lists {SHARD_FILE.sha256}, twice"
    )
    assert not run.folder.file(SHARD).exists()
    assert run.left_in_state() == []
    assert run.starts() == [None, None]
    assert run() == PROOF


def test_wrong_bytes_after_a_restart_count(run: Run) -> None:
    run.stop_after(1000)
    run.hub.set_faults(on_shard(Fault(Kind.STATUS, status=416), Fault(Kind.FLIP, at=5), Fault(Kind.FLIP, at=5)))
    with pytest.raises(TransferError, match="twice"):
        run()
    assert run.starts() == [1000, None, None]


def test_a_small_files_wrong_bytes_are_found_by_gits_sha1(run: Run) -> None:
    flip = Planned(Part.HUB, SMALL, Fault(Kind.FLIP, at=3), 0, 2)
    run.hub.set_faults(FaultSchedule((flip,)))
    with pytest.raises(TransferError, match=f"git sha1 is .* lists {SMALL_FILE.git_sha1}"):
        run(SMALL_FILE)
    assert run(SMALL_FILE).n_bytes == len(SMALL_BYTES)


def test_a_file_listed_without_a_checksum_is_held_to_its_size(run: Run) -> None:
    assert run(replace(SHARD_FILE, sha256=None)) == PROOF


def test_what_the_hub_lacks_is_refused(run: Run) -> None:
    with pytest.raises(HubError, match=r"^absent\.json: HTTP 404 .*no such file"):
        run(small_file("absent.json", b"x"))
    assert len(run.hub.requests) == 1


def test_patience_ends_with_the_part_kept(run: Run) -> None:
    cut = Planned(Part.CDN, SHARD, Fault(Kind.CUT, at=100_000))
    gone = Planned(Part.CDN, SHARD, Fault(Kind.DROP), 1, None)
    run.hub.set_faults(FaultSchedule((cut, gone)))
    with pytest.raises(TransferError, match=f"^{SHARD}: 100000 bytes are here, .*run the same command"):
        run(transfer=hasty(replace(HASTE, give_up_seconds=0.3)))
    run.hub.set_faults(FaultSchedule())
    run.hub.clear()
    assert run() == PROOF
    assert run.starts() == [100_000]


class GuardError(Exception):
    pass


def test_a_guard_that_raises_before_the_first_byte_keeps_it_away(run: Run) -> None:
    def guard(n_missing: int) -> None:
        raise GuardError(n_missing)

    transfer = hasty()
    with pytest.raises(GuardError, match="300000"):
        fetch_file(transfer, run.hub.endpoint, SHARD_FILE, run.folder, progress=run.told.append, guard=guard)
    transfer.close()
    assert run.hub.requests == []


def test_the_guard_is_asked_again_and_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GUARD_BYTES == 64 << 20
    monkeypatch.setattr("download.fetch.GUARD_BYTES", 100_000)
    assert run(transfer=hasty(max_bytes_per_second=4e6)) == PROOF
    assert run.guarded[0] == 300_000
    assert 1 < len(run.guarded) <= 4
    assert run.guarded == sorted(run.guarded, reverse=True)


def test_no_byte_is_lost_where_the_disk_takes_fewer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.pwrite
    monkeypatch.setattr("os.pwrite", lambda descriptor, data, offset: written(descriptor, data[:10_007], offset))
    assert run() == PROOF
    assert run.folder.file(SHARD).read_bytes() == SHARD_BYTES


def test_bytes_come_in_small_steps_at_a_low_rate(run: Run) -> None:
    run(SMALL_FILE, hasty(max_bytes_per_second=16_000))
    assert max(later - earlier for earlier, later in zip([0, *run.told], run.told, strict=False)) <= 4000


def test_a_full_disk_is_not_retried(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if offset >= 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(descriptor, data[: 100_000 - offset], offset)

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        run()
    monkeypatch.undo()
    assert run.folder.part(SHARD).stat().st_size == 100_000  # all that was written, and no more
    run.hub.clear()
    assert run() == PROOF
    assert run.starts() == [100_000]


def test_a_stop_while_the_present_bytes_are_hashed(run: Run) -> None:
    run.stop_after(299_999)
    transfer = hasty()
    transfer.stop.set()
    with pytest.raises(Stopped):
        run(transfer=transfer)
    assert run.folder.part(SHARD).stat().st_size == 299_999
    assert run.told == []


def test_threads_end_with_the_fetch(run: Run) -> None:
    for schedule in (FaultSchedule(), on_shard(Fault(Kind.FLIP, at=1), Fault(Kind.FLIP, at=1))):
        run.hub.set_faults(schedule)
        try:
            run()
        except TransferError:
            assert schedule.planned
        for thread in threading.enumerate():
            if thread.name == "receive":  # it may still be giving its connection back
                thread.join(timeout=5)
        assert {"hash", "receive"}.isdisjoint(thread.name for thread in threading.enumerate())


def test_the_final_name_replaces_what_was_there(run: Run) -> None:
    final = run.folder.file(SHARD)
    final.parent.mkdir()
    elsewhere = final.with_name("blob")
    elsewhere.write_bytes(b"another tool's")
    final.symlink_to(elsewhere)
    assert run() == PROOF
    assert not final.is_symlink()
    assert elsewhere.read_bytes() == b"another tool's"


def test_bytes_are_durable_before_they_have_their_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    synced = os.fsync

    def sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        steps.append(f"{path.name} {run.folder.file(NESTED).exists()}")
        synced(descriptor)

    monkeypatch.setattr("os.fsync", sync)
    run(small_file(NESTED, b"x = 1\n"))
    assert [step for step in steps if "json" not in step and "parts" not in step][-4:] == [
        "model.py.part False",
        "deep True",
        "inference True",
        "model True",
    ]


def test_unguarded_lets_everything_pass() -> None:
    unguarded(0)


@given(st.lists(st.binary(max_size=2000), max_size=8), st.integers(0, 8))
def test_digests_are_those_of_hashlib(blocks: list[bytes], n_forgotten: int) -> None:
    kept = blocks[n_forgotten:]
    whole = b"".join(kept)
    with Digests(len(whole)) as digests:
        for block in blocks[:n_forgotten]:
            digests.update(block)
        digests.restart()
        for block in kept:
            digests.update(block)
        assert digests.finish() == (
            hashlib.sha256(whole).hexdigest(),
            hashlib.sha1(b"blob %d\0" % len(whole) + whole).hexdigest(),
        )


def test_gits_sha1_of_a_file() -> None:
    # `printf 'hello\n' | git hash-object --stdin`
    with Digests(6) as digests:
        digests.update(b"hello\n")
        assert digests.finish()[1] == "ce013625030ba8dba906f756967f9e9ca394464a"
