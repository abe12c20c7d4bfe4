"""A folder between nothing and whole: what is fetched, what is kept, and what is said of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from container.errors import DownloadError, HubError, TransferError
from download.folder import SourceFolder
from download.hub import Hub
from download.ledger import Ledger, Origin, Proof
from download.mirror import Mirror
from download.transfer import Stopped, Transfer
from tests.download.served import HASTE, REPOSITORY
from tests.download.small_model import INDEX, SHARDS, contents, model_files, serve, wanted_files
from tests.hub import Fault, FaultSchedule, HubServer, Kind, Part, Planned

FILES = model_files()
SHARD = SHARDS[1]


@pytest.fixture
def transfer(hub: HubServer) -> Iterator[Transfer]:
    transfer = Transfer(headers=Hub(hub.endpoint).headers, patience=HASTE, seed=0)
    yield transfer
    transfer.close()


@pytest.fixture
def folder(tmp_path: Path) -> SourceFolder:
    return SourceFolder(tmp_path / "model")


def opened(hub: HubServer, transfer: Transfer, folder: SourceFolder, revision: str | None = None) -> Mirror:
    return Mirror.open(
        REPOSITORY, revision, folder, hub=Hub(hub.endpoint), transfer=transfer, ledger=Ledger(folder.ledger)
    )


@pytest.fixture
def mirror(hub: HubServer, transfer: Transfer, folder: SourceFolder) -> Mirror:
    serve(hub)
    return opened(hub, transfer, folder)


def put(mirror: Mirror, name: str, data: bytes) -> Path:
    path = mirror.folder.file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def fetched(hub: HubServer) -> list[str]:
    """Names of the files whose bytes were asked for."""
    return [one.name for one in hub.requests if one.name and (one.part is Part.CDN or one.status in (200, 206))]


def test_looking_writes_nothing(hub, mirror):
    assert mirror.origin == Origin(REPOSITORY, mirror.listing.commit)
    assert {file.name for file in mirror.small_files()} == set(wanted_files()) - set(SHARDS)
    assert [file.name for file in mirror.shards()] == list(SHARDS)
    assert mirror.index() == {f"t{n}": name for n, name in enumerate(SHARDS)}
    assert fetched(hub) == [INDEX]
    assert not mirror.folder.folder.exists()


def test_everything_arrives_and_is_proved(mirror):
    mirror.fetch_small_files()
    proofs = [mirror.fetch(shard) for shard in mirror.shards()]
    assert contents(mirror.folder.folder) == wanted_files()
    assert proofs == [Proof(name, len(FILES[name]), hashlib.sha256(FILES[name]).hexdigest()) for name in SHARDS]
    ledger = Ledger(mirror.folder.ledger)
    assert ledger.proved == mirror.ledger.proved
    assert {name: proof.sha256 for name, proof in ledger.proved.items()} == {
        name: hashlib.sha256(data).hexdigest() for name, data in wanted_files().items()
    }


def test_an_index_that_was_read_is_not_asked_for_again(hub, mirror):
    mirror.index()
    mirror.fetch_small_files()
    assert fetched(hub).count(INDEX) == 1
    assert mirror.folder.file(INDEX).read_bytes() == FILES[INDEX]
    mirror.index()
    assert fetched(hub).count(INDEX) == 1


def test_an_index_on_disk_counts_only_when_it_is_right(hub, mirror):
    put(mirror, INDEX, FILES[INDEX].replace(b"t0", b"t9"))
    assert set(mirror.index()) == {"t0", "t1", "t2"}
    assert fetched(hub) == [INDEX]
    mirror.fetch(mirror.listing.files[INDEX])
    assert mirror.folder.file(INDEX).read_bytes() == FILES[INDEX]


def test_an_index_on_disk_is_used(hub, mirror):
    put(mirror, INDEX, FILES[INDEX])
    assert set(mirror.index()) == {"t0", "t1", "t2"}
    assert fetched(hub) == []


def test_an_index_that_arrives_wrong_is_asked_for_again_once(hub, mirror, transfer, folder):
    hub.set_faults(FaultSchedule((Planned(Part.HUB, INDEX, Fault(Kind.FLIP, at=5)),)))
    assert set(mirror.index()) == {"t0", "t1", "t2"}
    hub.set_faults(FaultSchedule((Planned(Part.HUB, INDEX, Fault(Kind.FLIP, at=5), count=None),)))
    with pytest.raises(TransferError, match=r"^model\.safetensors\.index\.json: its git sha1 is .*, twice in a row"):
        opened(hub, transfer, folder).index()
    assert fetched(hub).count(INDEX) == 4


def test_an_index_beyond_belief(mirror, monkeypatch):
    monkeypatch.setattr("download.mirror.MAX_JSON_BYTES", len(FILES[INDEX]) - 1)
    with pytest.raises(HubError, match="too many for an index"):
        mirror.index()


def safetensors(*names: str) -> bytes:
    header = json.dumps({n: {"dtype": "U8", "shape": [1], "data_offsets": [k, k + 1]} for k, n in enumerate(names)})
    return len(header).to_bytes(8, "little") + header.encode() + bytes(len(names)) + b""


def test_a_checkpoint_in_one_file(hub, transfer, folder):
    single = safetensors("a", "b")
    hub.add(REPOSITORY, {"config.json": b"{}", "model.safetensors": single})
    mirror = opened(hub, transfer, folder)
    assert [file.name for file in mirror.shards()] == ["model.safetensors"]
    assert mirror.index() == dict.fromkeys(["a", "b"], "model.safetensors")
    assert sum(one.bytes_sent for one in hub.requests if one.part is Part.CDN) == 8 + len(single) - 2
    assert not folder.folder.exists()


def test_what_the_ledger_has_is_not_read(hub, mirror):
    """The proof: with the same size, other bytes are believed. An audit finds them."""
    shard = mirror.listing.files[SHARD]
    proof = mirror.fetch(shard)
    put(mirror, SHARD, bytes(len(FILES[SHARD])))
    told: list[int] = []
    assert mirror.is_proved(shard)
    assert mirror.fetch(shard, told.append) == proof
    assert told == [shard.n_bytes]
    assert fetched(hub) == [SHARD]


@pytest.mark.parametrize("wrong", [b"", b"short", bytes(60_000), bytes(len(FILES[SHARD]))], ids=len)
def test_a_file_that_is_wrong_is_fetched(hub, mirror, wrong):
    put(mirror, SHARD, wrong)
    mirror.fetch(mirror.listing.files[SHARD])
    assert mirror.folder.file(SHARD).read_bytes() == FILES[SHARD]
    assert fetched(hub) == [SHARD]


def test_a_proof_does_not_outlive_its_file(hub, mirror):
    shard = mirror.listing.files[SHARD]
    mirror.fetch(shard)
    mirror.folder.file(SHARD).write_bytes(FILES[SHARD][:-1])
    assert not mirror.is_proved(shard)
    mirror.folder.file(SHARD).unlink()
    assert not mirror.is_proved(shard)
    mirror.fetch(shard)
    assert mirror.folder.file(SHARD).read_bytes() == FILES[SHARD]


def test_a_file_of_another_tool_is_kept_when_it_is_right(hub, mirror):
    for name in (SHARD, "config.json"):
        put(mirror, name, FILES[name])
        told: list[int] = []
        proof = mirror.fetch(mirror.listing.files[name], told.append)
        assert told == [len(FILES[name])]
        assert Ledger(mirror.folder.ledger).proved[name] == proof
    assert fetched(hub) == []


def test_a_file_of_another_tool_is_on_the_disk_before_it_is_proved(mirror, monkeypatch):
    path = put(mirror, SHARD, FILES[SHARD])
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino) or fsync(descriptor))
    mirror.fetch(mirror.listing.files[SHARD])
    assert synced.index(path.stat().st_ino) < synced.index(mirror.folder.ledger.stat().st_ino)


def test_a_part_beside_a_whole_file_goes(mirror):
    put(mirror, SHARD, FILES[SHARD])
    for path in (mirror.folder.part(SHARD), mirror.folder.part_facts(SHARD)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
    mirror.fetch(mirror.listing.files[SHARD])
    assert list(mirror.folder.parts.iterdir()) == []


def test_a_part_counts_up_to_the_size_of_its_file(mirror):
    shard = mirror.listing.files[SHARD]
    part = mirror.folder.part(SHARD)
    assert mirror.part_bytes(shard) == 0
    part.parent.mkdir(parents=True)
    for n_bytes in (0, 10, shard.n_bytes):
        part.write_bytes(bytes(n_bytes))
        assert mirror.part_bytes(shard) == n_bytes
    part.write_bytes(bytes(shard.n_bytes + 10))
    assert mirror.part_bytes(shard) == shard.n_bytes
    mirror.fetch(shard)
    assert mirror.folder.file(SHARD).read_bytes() == FILES[SHARD]


def test_a_link_into_a_cache_is_followed_and_never_written_through(tmp_path, mirror):
    blob = tmp_path / "blob"
    blob.write_bytes(FILES[SHARD])
    mirror.folder.folder.mkdir()
    link = mirror.folder.file(SHARD)
    link.symlink_to(blob)
    mirror.fetch(mirror.listing.files[SHARD])
    assert link.is_symlink()
    damaged = bytes(len(FILES[SHARD]))
    blob.write_bytes(damaged)
    mirror.ledger.say_disproved(SHARD)
    mirror.fetch(mirror.listing.files[SHARD])
    assert not link.is_symlink()
    assert (link.read_bytes(), blob.read_bytes()) == (FILES[SHARD], damaged)


def test_another_commit_is_another_file(hub, transfer, folder):
    """Same name, same size: the ledger's proof of the old one says nothing of the new one."""
    repository = hub.add(REPOSITORY, FILES)
    old = opened(hub, transfer, folder)
    changed = {"config.json": b'{"model_type": "kimi_k2"}', SHARD: FILES[SHARD][::-1]}
    assert len(changed["config.json"]) == len(FILES["config.json"])
    for name in changed:
        old.fetch(old.listing.files[name])
    repository.commit(changed)
    new = opened(hub, transfer, folder)
    for name, data in changed.items():
        assert not new.is_proved(new.listing.files[name])
        new.fetch(new.listing.files[name])
        assert folder.file(name).read_bytes() == data
        assert Ledger(folder.ledger).proved[name].sha256 == hashlib.sha256(data).hexdigest()
    pinned = opened(hub, transfer, folder, old.listing.commit)
    pinned.fetch(pinned.listing.files[SHARD])
    assert folder.file(SHARD).read_bytes() == FILES[SHARD]


def test_an_old_part_does_not_get_new_bytes(hub, transfer, folder):
    repository = hub.add(REPOSITORY, FILES)
    old = opened(hub, transfer, folder)

    def stop(n_bytes: int) -> None:
        if n_bytes > 10_000:
            transfer.stop.set()

    with pytest.raises(Stopped):
        old.fetch(old.listing.files[SHARD], stop)
    assert old.part_bytes(old.listing.files[SHARD]) > 10_000
    transfer.stop.clear()
    repository.commit({SHARD: FILES[SHARD][::-1]})
    new = opened(hub, transfer, folder)
    new.fetch(new.listing.files[SHARD])
    assert folder.file(SHARD).read_bytes() == FILES[SHARD][::-1]


def test_a_stop_is_heeded_while_a_file_is_read_through(mirror, transfer):
    put(mirror, SHARD, FILES[SHARD])
    transfer.stop.set()
    with pytest.raises(Stopped):
        mirror.present(mirror.listing.files[SHARD])


def test_a_guard_may_end_it(mirror):
    asked: list[int] = []

    def guard(missing: int) -> None:
        asked.append(missing)
        raise DownloadError("no room")

    for name in (SHARD, INDEX):
        mirror.index()
        with pytest.raises(DownloadError, match="no room"):
            mirror.fetch(mirror.listing.files[name], guard=guard)
    assert asked == [len(FILES[SHARD]), len(FILES[INDEX])]
    assert contents(mirror.folder.folder) == {}
    assert not mirror.ledger.proved


def test_pieces_are_read_without_a_trace(hub, mirror):
    shard = mirror.listing.files[SHARD]
    assert mirror.read(shard, 100, 50) == FILES[SHARD][100:150]
    assert mirror.read(shard, 49_000) == FILES[SHARD][49_000:]
    assert mirror.read(shard) == FILES[SHARD]
    assert not mirror.folder.folder.exists()
