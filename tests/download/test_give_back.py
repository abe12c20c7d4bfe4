"""Deleting a shard: only what nobody else holds, the ledger first, and to the end after any crash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from container.errors import SourceError
from download.folder import SourceFolder
from download.give_back import files_of, give_back
from download.ledger import Ledger, Proof, Reclaimed

SHARD = "model-00001-of-000002.safetensors"
OTHER = "model-00002-of-000002.safetensors"
DATA = b"weights" * 100


def plain(folder: Path) -> SourceFolder:
    """A folder with two shards as files."""
    folder.mkdir(parents=True)
    for name in (SHARD, OTHER):
        (folder / name).write_bytes(DATA)
    return SourceFolder(folder)


def cached(root: Path, *, absolute: bool = False, revision: str = "1" * 40) -> SourceFolder:
    """A snapshot of huggingface_hub's cache below `root`: links into blobs."""
    repository = root / "models--org--name"
    snapshot, blobs = repository / "snapshots" / revision, repository / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate((SHARD, OTHER)):
        blob = blobs / f"{number:064x}"
        blob.write_bytes(DATA)
        (snapshot / name).symlink_to(blob if absolute else Path("../../blobs") / blob.name)
    return SourceFolder(snapshot)


def blob_of(folder: SourceFolder, name: str = SHARD) -> Path:
    return folder.file(name).resolve()


def gone(folder: SourceFolder, into: Path, ledger: Ledger | None = None) -> int:
    return give_back(folder, ledger or Ledger(folder.ledger), SHARD, into)


def names(folder: SourceFolder) -> set[str]:
    return {path.name for path in folder.folder.glob("*.safetensors")}


def test_a_file(tmp_path):
    folder, ledger = plain(tmp_path / "source"), Ledger(tmp_path / "source" / ".moedock" / "ledger.jsonl")
    assert give_back(folder, ledger, SHARD, tmp_path / "out") == len(DATA)
    assert names(folder) == {OTHER}
    expected = Reclaimed(SHARD, len(DATA), str((tmp_path / "out").resolve()))
    assert ledger.reclaimed == Ledger(folder.ledger).reclaimed == {SHARD: expected}


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_a_link_and_its_blob(tmp_path, absolute):
    folder = cached(tmp_path, absolute=absolute)
    blob = blob_of(folder)
    assert gone(folder, tmp_path / "out") == len(DATA)
    assert not blob.exists()
    assert not folder.file(SHARD).is_symlink()
    assert blob_of(folder, OTHER).read_bytes() == DATA


@pytest.mark.parametrize("way", ["a link to the snapshot", "a link to the cache", "relative", "with dots"])
def test_a_snapshot_by_another_way(tmp_path, monkeypatch, way):
    """Only what the path leads to counts."""
    folder = cached(tmp_path / "hub")
    snapshot, blob = folder.folder, blob_of(folder)
    (tmp_path / "model").symlink_to(snapshot)
    (tmp_path / "cache").symlink_to(tmp_path / "hub")
    monkeypatch.chdir(snapshot)
    path = {
        "a link to the snapshot": tmp_path / "model",
        "a link to the cache": tmp_path / "cache" / snapshot.relative_to(tmp_path / "hub"),
        "relative": Path(),
        "with dots": snapshot / ".." / snapshot.name,
    }[way]
    gone(SourceFolder(path), tmp_path / "out")
    assert not blob.exists()
    assert names(folder) == {OTHER}


@pytest.mark.parametrize("name", [SHARD, "model-renamed.safetensors", "weights.bin"])
def test_a_blob_that_another_snapshot_uses(tmp_path, name):
    folder = cached(tmp_path)
    other = folder.folder.parent / ("2" * 40)
    other.mkdir()
    (other / name).symlink_to(blob_of(folder))
    with pytest.raises(SourceError, match=f"{SHARD}: .*{name} uses the same blob; delete that snapshot first"):
        gone(folder, tmp_path / "out")
    assert blob_of(folder).read_bytes() == DATA
    assert not folder.ledger.exists()
    (other / name).unlink()
    assert gone(folder, tmp_path / "out") == len(DATA)


def test_other_snapshots_with_other_blobs_do_not_matter(tmp_path):
    folder = cached(tmp_path)
    other = folder.folder.parent / ("2" * 40)
    other.mkdir()
    (other / SHARD).symlink_to(blob_of(folder, OTHER))
    (other / "loop").symlink_to("loop")
    (other / "nowhere").symlink_to("../../blobs/absent")
    gone(folder, tmp_path / "out")
    assert names(folder) == {OTHER}


def link_elsewhere(folder: SourceFolder, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(DATA)
    folder.file(SHARD).symlink_to(tmp_path / "weights")


def link_to_a_sibling(folder: SourceFolder, tmp_path: Path) -> None:
    folder.file(SHARD).symlink_to(OTHER)


def link_to_itself(folder: SourceFolder, tmp_path: Path) -> None:
    folder.file(SHARD).symlink_to(SHARD)


def link_to_another_repositorys_blob(folder: SourceFolder, tmp_path: Path) -> None:
    folder.file(SHARD).symlink_to(blob_of(cached(tmp_path / "another")))


def link_to_a_linked_blob(folder: SourceFolder, tmp_path: Path) -> None:
    blobs = folder.folder.parent.parent / "blobs"
    (blobs / "linked").symlink_to(blob_of(folder, OTHER))
    folder.file(SHARD).symlink_to(blobs / "linked")


def test_a_folder_that_only_looks_like_the_cache(tmp_path):
    """Whose blobs those are, nobody knows."""
    folder = cached(tmp_path)
    other = folder.folder.parent.rename(folder.folder.parent.with_name("checkouts")) / folder.folder.name
    with pytest.raises(SourceError, match=f"{SHARD}: is a link to .*, which others may use"):
        gone(SourceFolder(other), tmp_path / "out")
    assert (other / SHARD).read_bytes() == DATA


@pytest.mark.parametrize(
    "link",
    [
        link_elsewhere,
        link_to_a_sibling,
        link_to_itself,
        link_to_another_repositorys_blob,
        link_to_a_linked_blob,
    ],
)
@pytest.mark.parametrize("make", [plain, cached])
def test_links_that_others_may_use(tmp_path, make, link):
    folder = make(tmp_path / "source")
    folder.file(SHARD).unlink()
    (folder.folder.parent.parent / "blobs").mkdir(exist_ok=True)
    link(folder, tmp_path)
    with pytest.raises(SourceError, match=f"{SHARD}: is a link to .*, which others may use; convert without --reclaim"):
        gone(folder, tmp_path / "out")
    assert folder.file(SHARD).is_symlink()
    assert not folder.ledger.exists()


@pytest.mark.parametrize("make", [plain, cached])
def test_hard_links(tmp_path, make):
    folder = make(tmp_path / "source")
    os.link(blob_of(folder), tmp_path / "second")
    with pytest.raises(SourceError, match=f"{SHARD}: has 2 hard links, so deleting it frees nothing"):
        gone(folder, tmp_path / "out")
    assert folder.file(SHARD).read_bytes() == DATA
    (tmp_path / "second").unlink()
    assert gone(folder, tmp_path / "out") == len(DATA)


class CrashError(Exception):
    pass


@pytest.mark.parametrize("make", [plain, cached])
def test_a_crash_anywhere(tmp_path, monkeypatch, make):
    """Before each sync and each removal in turn: the ledger knows before anything goes, and the next call finishes."""
    struck = []
    for number in range(20):
        folder = make(tmp_path / str(number) / "source")
        blob, left = blob_of(folder), [number]

        def strike(what: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                struck.append(what)
                raise CrashError

        with monkeypatch.context() as patch:
            real_fsync, real_unlink = os.fsync, os.unlink

            def fsync(descriptor: int, strike=strike, real=real_fsync) -> None:
                strike(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
                real(descriptor)

            def unlink(path, strike=strike, real=real_unlink, **options) -> None:
                strike(f"unlink {'link' if Path(path).is_symlink() else 'file'}")
                real(path, **options)

            patch.setattr(os, "fsync", fsync)
            patch.setattr(os, "unlink", unlink)
            try:
                gone(folder, tmp_path / "out")
            except CrashError:
                crashed = True
            else:
                crashed = False
        ledger = Ledger(folder.ledger)
        if not blob.exists() or not folder.file(SHARD).exists():
            assert SHARD in ledger.reclaimed
        n_bytes = len(DATA) if blob.exists() else 0
        assert gone(folder, tmp_path / "out") == n_bytes
        assert names(folder) == {OTHER}
        assert not blob.exists()
        assert Ledger(folder.ledger).reclaimed[SHARD].n_bytes == len(DATA)
        if not crashed:
            break
    first_removal = next(n for n, what in enumerate(struck) if what.startswith("unlink"))
    assert struck[:first_removal] == ["fsync ledger.jsonl", "fsync .moedock"]
    if make is cached:
        assert struck[first_removal:] == ["unlink file", "fsync blobs", "unlink link", f"fsync {'1' * 40}"]
    else:
        assert struck[first_removal:] == ["unlink file", "fsync source"]


def test_a_shard_that_came_back(tmp_path):
    """By whatever way; the ledger then names the container that it went into last."""
    folder, ledger = plain(tmp_path / "source"), Ledger(tmp_path / "source" / ".moedock" / "ledger.jsonl")
    for into in ("first", "second", "first"):
        folder.file(SHARD).write_bytes(DATA)
        assert give_back(folder, ledger, SHARD, tmp_path / into) == len(DATA)
        assert Ledger(folder.ledger).reclaimed[SHARD].into == str((tmp_path / into).resolve())
    folder.file(SHARD).write_bytes(DATA)
    ledger.say_proved(Proof(SHARD, len(DATA), "0" * 64))
    assert SHARD not in Ledger(folder.ledger).reclaimed
    give_back(folder, ledger, SHARD, tmp_path / "first")
    assert SHARD in Ledger(folder.ledger).reclaimed


def test_again_without_a_shard_nothing_is_said(tmp_path):
    folder = plain(tmp_path / "source")
    gone(folder, tmp_path / "out")
    said = folder.ledger.read_bytes()
    assert gone(folder, tmp_path / "moved") == 0
    assert folder.ledger.read_bytes() == said


def test_what_goes(tmp_path):
    folder = cached(tmp_path)
    blob = folder.folder / "../../blobs" / blob_of(folder).name
    assert files_of(folder.file(SHARD)) == [blob, folder.file(SHARD)]
    assert files_of(folder.file("absent.safetensors")) == [folder.file("absent.safetensors")]
