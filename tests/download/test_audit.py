"""`--check`: every way in which a folder can differ from the repository, whoever filled it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from container.errors import BusyError, DownloadError
from container.lock import held_lock
from download.audit import Audit, audit
from download.folder import SourceFolder
from download.ledger import Ledger, Reclaimed
from download.options import Check
from tests.download.served import REPOSITORY
from tests.download.small_model import INDEX, SHARDS, contents, download_here, options_for, serve, wanted_files
from tests.hub import HubServer, Part

WANTED = wanted_files()


@pytest.fixture
def folder(hub: HubServer, tmp_path: Path) -> Path:
    """Filled by another tool."""
    serve(hub)
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in WANTED.items():
        (folder / name).write_bytes(data)
    return folder


def check(hub: HubServer, folder: Path, how: Check = Check.SHA256, **options: Any) -> Audit:
    return audit(options_for(hub, folder, check=how, **options), io.StringIO())


@pytest.mark.parametrize("how", list(Check))
def test_a_folder_that_is_right(hub, folder, how):
    found = check(hub, folder, how)
    assert (found.problems, found.left_out, found.notes) == ((), (), ())
    assert (found.n_files, found.total_bytes) == (len(WANTED), sum(map(len, WANTED.values())))
    assert contents(folder) == WANTED
    assert [one for one in hub.requests if one.part is not Part.API] == []


def test_an_audit_of_sizes_writes_nothing(hub, folder):
    check(hub, folder, Check.SIZE)
    assert not SourceFolder(folder).state.exists()


def test_an_audit_of_checksums_proves(hub, folder):
    check(hub, folder)
    ledger = Ledger(SourceFolder(folder).ledger)
    assert ledger.demands_proofs
    assert set(ledger.proved) == set(WANTED)
    before = ledger.path.read_bytes()
    check(hub, folder)
    assert ledger.path.read_bytes() == before
    summary, _ = download_here(hub, folder)
    assert (summary.n_fetched, summary.complete) == (0, True)


def damage(folder: Path) -> dict[str, str]:
    """One of each kind of damage that sizes show: file → problem."""
    (folder / "README.md").unlink()
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    (folder / INDEX).write_bytes(b"{}")
    (folder / SHARDS[0]).write_bytes(WANTED[SHARDS[0]][:-1])
    (folder / SHARDS[1]).write_bytes(WANTED[SHARDS[1]] + b"x")
    (folder / "tiktoken.model").unlink()
    (folder / "tiktoken.model").symlink_to("nowhere")
    return {
        "README.md": "missing",
        "config.json": "not a file",
        INDEX: f"2 bytes, expected {len(WANTED[INDEX])}",
        SHARDS[0]: "49,999 bytes, expected 50,000",
        SHARDS[1]: "50,002 bytes, expected 50,001",
        "tiktoken.model": "a link to nowhere, where nothing is",
    }


@pytest.mark.parametrize("how", list(Check))
def test_all_that_is_wrong_is_in_one_list(hub, folder, how):
    expected = damage(folder)
    before = contents(folder)
    assert dict(problem.split(": ", 1) for problem in check(hub, folder, how).problems) == expected
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["config.json", SHARDS[2]])
@pytest.mark.parametrize("offset", [0, -1])
def test_one_wrong_byte(hub, folder, name, offset):
    data = bytearray(WANTED[name])
    data[offset] ^= 1
    (folder / name).write_bytes(data)
    assert check(hub, folder, Check.SIZE).problems == ()
    [problem] = check(hub, folder).problems
    assert problem.startswith(f"{name}: its {'sha256' if 'model' in name else 'git sha1'} is ")
    assert name not in Ledger(SourceFolder(folder).ledger).proved


@pytest.mark.parametrize("wrong", [bytes(len(WANTED[SHARDS[2]])), b"", None])
def test_a_proof_that_does_not_hold_is_taken_back_and_the_file_fetched(hub, folder, wrong):
    check(hub, folder)
    (folder / SHARDS[2]).unlink()
    if wrong is not None:
        (folder / SHARDS[2]).write_bytes(wrong)
    assert len(check(hub, folder).problems) == 1
    assert set(Ledger(SourceFolder(folder).ledger).proved) == set(WANTED) - {SHARDS[2]}
    hub.clear()
    assert download_here(hub, folder)[0].n_fetched == 1
    assert [one.name for one in hub.requests if one.part is Part.CDN] == [SHARDS[2]]
    assert contents(folder) == WANTED
    assert check(hub, folder).problems == ()


def hub_cache(tmp_path: Path, folder: Path, commit: str) -> Path:
    """The same files as huggingface_hub's cache lays them out: a snapshot of links to blobs."""
    cache = tmp_path / f"models--{REPOSITORY.replace('/', '--')}"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_a_cache_of_the_hub_library_is_compared_with_the_commit_of_its_name(hub, tmp_path, folder):
    commit = hub.add(REPOSITORY, WANTED).find("main").sha
    snapshot = hub_cache(tmp_path, folder, commit)
    hub.add(REPOSITORY, {**WANTED}).commit({"config.json": b"{}"})
    found = check(hub, snapshot)
    assert (found.problems, found.revision) == ((), commit)
    assert set(Ledger(SourceFolder(snapshot).ledger).proved) == set(WANTED)
    assert all(path.is_symlink() for path in snapshot.iterdir() if path.name != ".moedock")


def test_a_damaged_cache(hub, tmp_path, folder):
    snapshot = hub_cache(tmp_path, folder, hub.add(REPOSITORY, WANTED).find("main").sha)
    (snapshot / SHARDS[0]).resolve().write_bytes(bytes(50_000))
    (snapshot / SHARDS[1]).resolve().unlink()
    problems = check(hub, snapshot).problems
    assert [problem.split(":")[0] for problem in problems] == [SHARDS[0], SHARDS[1]]
    assert problems[1].endswith(", where nothing is")


def test_without_a_revision_the_ledgers_commit_counts(hub, tmp_path):
    repository = hub.add(REPOSITORY, WANTED)
    folder = tmp_path / "model"
    summary, _ = download_here(hub, folder)
    repository.commit({"config.json": b"[]"})
    assert check(hub, folder).revision == summary.revision
    found = check(hub, folder, Check.SIZE, revision="main")
    assert found.problems == (f"config.json: {len(WANTED['config.json'])} bytes, expected 2",)


def test_a_folder_that_cannot_be_written(hub, folder, monkeypatch):
    """As a read-only disk has it; file modes would not stop a test that runs as root."""

    def read_only(path: Path, **_: Any) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    (folder / SHARDS[0]).write_bytes(bytes(50_000))
    found = check(hub, folder)
    assert found.notes == (f"{folder} cannot be written (Read-only file system): what was proved is noted nowhere",)
    assert len(found.problems) == 1
    assert not SourceFolder(folder).state.exists()


def test_a_file_that_cannot_be_read(hub, folder, monkeypatch):
    real_open = Path.open

    def broken(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == SHARDS[1]:
            raise OSError(5, "Input/output error", str(path))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", broken)
    assert check(hub, folder).problems == (f"{SHARDS[1]}: cannot be read (Input/output error)",)


def test_shards_that_were_given_back_are_not_missing(hub, folder):
    ledger = Ledger(SourceFolder(folder).ledger)
    ledger.say_reclaimed(Reclaimed(SHARDS[0], 50_000, "/somewhere/out"))
    assert check(hub, folder).notes == ()  # it is still here
    ledger.say_reclaimed(Reclaimed(SHARDS[0], 50_000, "/somewhere/out"))
    (folder / SHARDS[0]).unlink()
    for how in Check:
        found = check(hub, folder, how)
        assert found.problems == ()
        assert found.notes == ("1 shard(s) were given back after their conversion into /somewhere/out",)


def test_a_file_that_is_begun(hub, folder):
    (folder / SHARDS[0]).unlink()
    part = SourceFolder(folder).part(SHARDS[0])
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(2000))
    assert check(hub, folder, Check.SIZE).problems == (f"{SHARDS[0]}: missing (2,000 of 50,000 bytes are begun)",)


def test_only_what_was_chosen_is_compared(hub, folder):
    damage(folder)
    found = check(hub, folder, include=(SHARDS[2], "t*"), exclude=("tiktoken*",))
    assert (found.problems, found.n_files) == ((), 2)
    assert set(found.left_out) == set(WANTED) - {SHARDS[2], "tokenizer_config.json"}


def test_not_beside_a_download(hub, folder):
    with held_lock(SourceFolder(folder).lock, "another download"):
        with pytest.raises(BusyError, match="another download is running here"):
            check(hub, folder)
        assert check(hub, folder, Check.SIZE).problems == ()


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_bytes(b"")])
def test_no_folder(hub, tmp_path, make):
    make(tmp_path / "model")
    with pytest.raises(DownloadError, match="no such folder, so there is nothing to check"):
        check(hub, tmp_path / "model")


def test_the_result_as_json(hub, folder):
    damage(folder)
    found = json.loads(json.dumps(check(hub, folder).to_json()))
    assert (found["right"], found["check"], len(found["problems"])) == (False, "sha256", 6)
    assert found["folder"] == str(folder)
