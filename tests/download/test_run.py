"""Whole downloads: resumed, refused, out of room, with files that cannot be had."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import download.run
from container.errors import BusyError, DownloadError, HubError, UsageError
from container.lock import held_lock
from container.machine import free_disk
from download.folder import SourceFolder
from download.ledger import Ledger, Origin, Reclaimed
from download.options import Check, DownloadOptions
from download.run import plan_download
from tests.download.served import HASTE, REPOSITORY
from tests.download.small_model import (
    INDEX,
    OTHER_FILES,
    SHARDS,
    contents,
    download_here,
    index_of,
    model_files,
    options_for,
    serve,
    wanted_files,
)
from tests.hub import Fault, FaultSchedule, HubServer, Kind, Part, Planned

WANTED = wanted_files()


@pytest.fixture
def folder(hub: HubServer, tmp_path: Path) -> Path:
    """Not there yet; the hub has the small checkpoint."""
    serve(hub)
    return tmp_path / "new" / "model"


def state_files(folder: Path) -> list[str]:
    state = SourceFolder(folder).state
    return sorted(path.relative_to(state).as_posix() for path in state.rglob("*"))


def served(hub: HubServer) -> list[str]:
    """Names of the files whose bytes were sent, in order."""
    return [one.name for one in hub.requests if one.name and one.status in (200, 206)]


def test_a_whole_download(hub, folder):
    summary, said = download_here(hub, folder)
    assert contents(folder) == WANTED
    assert state_files(folder) == ["ledger.jsonl", "lock"]
    assert (summary.complete, summary.n_files, summary.n_fetched) == (True, len(WANTED), len(WANTED))
    assert summary.total_bytes == summary.fetched_bytes == sum(map(len, WANTED.values()))
    ledger = Ledger(SourceFolder(folder).ledger)
    assert (set(ledger.proved), ledger.origin) == (set(WANTED), Origin(REPOSITORY, summary.revision))
    assert said.startswith(f"org/name at {summary.revision[:12]}: {len(WANTED)} files, 147.2 KiB; 0 B present, 147.2")
    assert json.loads(json.dumps(summary.to_json()))["complete"] is True


def test_small_files_come_first_then_shards_in_order(hub, folder):
    download_here(hub, folder, jobs=1)
    small = sorted(WANTED.keys() - {"empty.txt", INDEX, *SHARDS}, key=lambda name: (len(WANTED[name]), name))
    assert served(hub) == [INDEX, *small, *SHARDS]


def test_again_with_nothing_to_do(hub, folder):
    download_here(hub, folder)
    ledger = SourceFolder(folder).ledger.read_bytes()
    hub.clear()
    summary, said = download_here(hub, folder)
    assert (summary.complete, summary.n_fetched, summary.fetched_bytes) == (True, 0, 0)
    assert served(hub) == []
    assert SourceFolder(folder).ledger.read_bytes() == ledger
    assert "note:" not in said


def test_only_what_is_gone_or_damaged_comes_again(hub, folder):
    download_here(hub, folder)
    (folder / SHARDS[1]).unlink()
    (folder / SHARDS[2]).write_bytes(b"short")
    (folder / "config.json").write_bytes(bytes(len(WANTED["config.json"])))
    hub.clear()
    summary, said = download_here(hub, folder)
    assert sorted(served(hub)) == sorted(["config.json", SHARDS[1], SHARDS[2]])
    assert summary.n_fetched == 3
    assert "config.json: the file here is not the repository's; fetching it again\n" in said
    assert contents(folder) == WANTED


def test_a_folder_of_another_tool_is_proved_and_completed(hub, folder):
    folder.mkdir(parents=True)
    for name in SHARDS:
        (folder / name).write_bytes(WANTED[name])
    (folder / SHARDS[0]).write_bytes(bytes(50_000))  # the right size, the wrong bytes
    (folder / "notes.txt").write_bytes(b"mine")
    download_here(hub, folder)
    assert contents(folder) == {**WANTED, "notes.txt": b"mine"}
    assert [name for name in served(hub) if name in SHARDS] == [SHARDS[0]]
    assert set(Ledger(SourceFolder(folder).ledger).proved) == set(WANTED)


def interrupt_after(hub: HubServer, monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    """Ctrl-C in the main thread once so many bytes of each shard's first half are sent."""

    def show(*_: Any) -> None:
        if all(hub.bytes_sent(name) >= n_bytes for name in SHARDS):
            raise KeyboardInterrupt

    monkeypatch.setattr("download.crew.POLL_SECONDS", 0.01)
    monkeypatch.setattr("download.crew._View.show", show)


def test_an_interrupted_download_goes_on_at_the_byte(hub, folder, monkeypatch):
    hub.set_rate(60_000)
    interrupt_after(hub, monkeypatch, 6000)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        download_here(hub, folder)
    assert time.monotonic() - began < 3
    assert not [one for one in threading.enumerate() if one.name.startswith("downloading")]
    monkeypatch.undo()
    parts = {name: SourceFolder(folder).part(name).stat().st_size for name in SHARDS}
    assert all(5000 < n_bytes < 50_000 for n_bytes in parts.values())
    hub.set_rate(None)
    hub.clear()
    summary, said = download_here(hub, folder)
    assert contents(folder) == WANTED
    assert {one.name: one.range_start for one in hub.requests if one.part is Part.CDN} == parts
    assert summary.fetched_bytes == sum(len(WANTED[name]) - parts[name] for name in SHARDS)
    assert state_files(folder) == ["ledger.jsonl", "lock"]
    assert " present, " in said


def test_a_branch_that_moved_is_said(hub, tmp_path):
    folder = tmp_path / "model"
    repository = hub.add(REPOSITORY, model_files())
    first, _ = download_here(hub, folder)
    repository.commit({"config.json": b"{}", SHARDS[0]: WANTED[SHARDS[0]][::-1]})
    hub.clear()
    second, said = download_here(hub, folder)
    assert sorted(served(hub)) == ["config.json", SHARDS[0]]
    assert f"note: the folder was filled from {first.revision[:12]}, and main is {second.revision[:12]} now" in said
    assert (folder / SHARDS[0]).read_bytes() == WANTED[SHARDS[0]][::-1]
    back, _ = download_here(hub, folder, revision=first.revision)
    assert back.revision == first.revision
    assert contents(folder) == model_files()


def test_no_proof_of_the_old_commit_is_left_when_the_new_one_breaks_off(hub, tmp_path):
    """A converter must not take the old shard of the same name for the new one."""
    folder = tmp_path / "model"
    repository = hub.add(REPOSITORY, model_files())
    download_here(hub, folder)
    repository.commit({SHARDS[0]: WANTED[SHARDS[0]][::-1]})
    hub.set_faults(FaultSchedule((Planned(Part.HUB, SHARDS[0], Fault(Kind.STATUS, status=404), count=None),)))
    with pytest.raises(DownloadError):
        download_here(hub, folder)
    assert set(Ledger(SourceFolder(folder).ledger).proved) == set(model_files()) - {SHARDS[0]}


def test_another_repository_in_the_folder_is_said(hub, folder):
    download_here(hub, folder)
    serve(hub, {**model_files(), "config.json": b"{}"}, repository="org/other")
    _, said = download_here(hub, folder, repository="org/other")
    assert "note: the folder was filled from org/name: what differs is fetched again\n" in said


def test_parts_of_files_that_are_no_more_go(hub, folder):
    places = SourceFolder(folder)
    for name in ("old.safetensors", "sub/old.txt", SHARDS[0]):
        for path in (places.part(name), places.part_facts(name)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"{}")
    hub.set_faults(FaultSchedule((Planned(Part.HUB, SHARDS[0], Fault(Kind.STATUS, status=404), count=None),)))
    with pytest.raises(DownloadError):
        download_here(hub, folder)
    assert sorted(path.name for path in places.parts.iterdir()) == [f"{SHARDS[0]}.json", f"{SHARDS[0]}.part"]
    hub.set_faults(FaultSchedule())
    download_here(hub, folder)
    assert not places.parts.exists()


@pytest.mark.parametrize("name", ["config.json", SHARDS[1]])
def test_one_file_that_cannot_be_had_stops_no_other(hub, folder, name):
    hub.set_faults(FaultSchedule((Planned(Part.HUB, name, Fault(Kind.STATUS, status=404), count=None),)))
    with pytest.raises(DownloadError) as error:
        download_here(hub, folder, jobs=1)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{folder}: 1 of {len(WANTED)} files could not be fetched"
    assert lines[1].startswith(f"  - {name}: HTTP 404")
    assert lines[2] == "the others are kept; run the same command to try these again"
    assert contents(folder) == {other: data for other, data in WANTED.items() if other != name}
    hub.set_faults(FaultSchedule())
    hub.clear()
    assert download_here(hub, folder)[0].complete
    assert served(hub) == [name]


def test_a_long_list_of_failures_is_cut(hub, folder, monkeypatch):
    monkeypatch.setattr(download.run, "SHOWN_REASONS", 1)
    monkeypatch.setattr(download.run, "SHOWN_NAMES", 1)
    statuses = {SHARDS[0]: 404, SHARDS[1]: 404, SHARDS[2]: 410}
    faults = [Planned(Part.HUB, name, Fault(Kind.STATUS, status=n), count=None) for name, n in statuses.items()]
    hub.set_faults(FaultSchedule(tuple(faults)))
    with pytest.raises(DownloadError) as error:
        download_here(hub, folder, jobs=1)
    lines = str(error.value).splitlines()
    assert lines[1].startswith(f"  - {SHARDS[0]} and 1 more: HTTP 404")
    assert lines[2:] == ["  … and 1 more reasons", "the others are kept; run the same command to try these again"]


def test_a_gated_repository_leaves_no_folder(hub, tmp_path):
    serve(hub, gated=True)
    with pytest.raises(HubError, match="the repository is gated; accept its conditions"):
        download_here(hub, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert len(hub.of(INDEX)) == 1


def test_a_gated_repository_is_not_asked_for_every_shard(hub, tmp_path):
    """In a folder that has the index already."""
    serve(hub, gated=True)
    (tmp_path / INDEX).write_bytes(WANTED[INDEX])
    with pytest.raises(DownloadError) as error:
        download_here(hub, tmp_path, jobs=1)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{tmp_path}: 4 of {len(WANTED)} files could not be fetched"
    assert lines[1].startswith("  - README.md, ")
    assert lines[1].count("accept its conditions") == 1
    assert len(lines) == 3
    assert not {one.name for one in hub.requests} & set(SHARDS)


def test_a_token_opens_a_gated_repository(hub, tmp_path, monkeypatch):
    serve(hub, gated=True)
    hub.allow("secret", REPOSITORY)
    monkeypatch.setenv("HF_TOKEN", "secret")
    download_here(hub, tmp_path)
    assert contents(tmp_path) == WANTED
    assert not any(one.had_authorization for one in hub.requests if one.part is Part.CDN)


def test_room_is_counted_before_the_first_byte(hub, folder, monkeypatch):
    n_bytes = sum(map(len, WANTED.values()))
    monkeypatch.setattr("download.plan.free_disk", lambda path: n_bytes + 999_999)
    monkeypatch.setattr("download.run.free_disk", lambda path: 1 << 40)
    with pytest.raises(DownloadError) as error:
        download_here(hub, folder, min_free_gb=0.001)
    assert str(error.value).startswith(
        f"{folder}: 147.2 KiB are still to be fetched and 976.6 KiB are to stay free (--min-free), but only 1.1 MiB "
        "are free (0 B are present); make room"
    )
    assert contents(folder) == {}
    assert [name for name in served(hub) if name != INDEX] == []
    monkeypatch.setattr("download.plan.free_disk", lambda path: n_bytes + 1_000_000)
    assert download_here(hub, folder, min_free_gb=0.001)[0].complete


def test_what_is_here_needs_no_room(hub, folder, monkeypatch):
    download_here(hub, folder)
    (folder / SHARDS[0]).unlink()
    part = SourceFolder(folder).part(SHARDS[0])
    part.parent.mkdir()
    part.write_bytes(bytes(20_000))
    monkeypatch.setattr("download.plan.free_disk", lambda path: 29_999)
    monkeypatch.setattr("download.run.free_disk", lambda path: 1 << 40)
    with pytest.raises(DownloadError, match=r"29\.3 KiB are still to be fetched and 0 B are .*only 29\.3 KiB are free"):
        download_here(hub, folder, min_free_gb=0)
    monkeypatch.setattr("download.plan.free_disk", lambda path: 30_000)
    assert download_here(hub, folder, min_free_gb=0)[0].complete


def test_a_full_folder_needs_no_room_at_all(hub, folder, monkeypatch):
    download_here(hub, folder)
    monkeypatch.setattr("download.plan.free_disk", lambda path: 0)
    assert download_here(hub, folder)[0].complete


def test_room_that_others_take_stops_all(hub, folder, monkeypatch):
    monkeypatch.setattr("download.run.free_disk", lambda path: 10**9 if list(folder.glob("*.json")) else 10**12)
    with pytest.raises(DownloadError) as error:
        download_here(hub, folder, jobs=1)
    assert str(error.value) == (
        f"{folder}: only 953.7 MiB are free, and 953.7 MiB are to stay so (--min-free); what was fetched is kept. Make "
        "room and run the same command to continue"
    )
    assert not set(SHARDS) & contents(folder).keys()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_stops_all(hub, folder, monkeypatch, number):
    real = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if offset > 10_000:
            raise OSError(number, "full")
        return real(descriptor, data[:5000], offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DownloadError) as error:
        download_here(hub, folder, jobs=1)
    assert str(error.value).startswith(f"{folder}: the disk is full (")
    assert str(error.value).endswith("what was fetched is kept. Make room and run the same command to continue")
    assert served(hub).count(SHARDS[0]) == 1
    assert SHARDS[1] not in served(hub)
    monkeypatch.undo()
    part_bytes = SourceFolder(folder).part(SHARDS[0]).stat().st_size
    assert part_bytes > 10_000
    hub.clear()
    download_here(hub, folder)
    assert contents(folder) == WANTED
    assert [one.range_start for one in hub.of(SHARDS[0], Part.CDN)] == [part_bytes]


def test_a_defect_of_ours_is_not_hidden(hub, folder, monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("download.mirror.fetch_file", broken)
    with pytest.raises(ZeroDivisionError):
        download_here(hub, folder)


def test_one_download_at_a_time(hub, folder):
    with held_lock(SourceFolder(folder).lock, "another download"), pytest.raises(BusyError) as error:
        download_here(hub, folder)
    assert str(error.value).startswith(f"{folder}: another download is running here (process ")
    assert contents(folder) == {}


def test_what_the_run_before_us_did_counts(hub, folder, monkeypatch):
    """It held the lock while we listed, and finished in between."""
    real = held_lock

    @contextlib.contextmanager
    def lock_after_another_run(path: Path, what: str) -> Iterator[None]:
        monkeypatch.setattr(download.run, "held_lock", real)
        download_here(hub, folder)
        hub.clear()
        before = SourceFolder(folder).ledger.read_bytes()
        with real(path, what):
            yield
        assert SourceFolder(folder).ledger.read_bytes() == before

    monkeypatch.setattr(download.run, "held_lock", lock_after_another_run)
    assert download_here(hub, folder)[0].n_fetched == 0
    assert served(hub) == []


def test_a_staging_folder_is_left_alone(hub, folder):
    Ledger(SourceFolder(folder).ledger).say_staging()
    with pytest.raises(DownloadError, match="is the staging folder of a conversion"):
        download_here(hub, folder)
    assert contents(folder) == {}


def given_back(folder):
    """A shard that a conversion has deleted."""
    Ledger(SourceFolder(folder).ledger).say_reclaimed(Reclaimed(SHARDS[2], 50_002, "/somewhere/out"))
    (folder / SHARDS[2]).unlink()


def test_shards_given_back_are_fetched_only_when_named(hub, folder):
    """`download && convert --reclaim on`, repeated after an interruption, must not begin anew."""
    download_here(hub, folder)
    given_back(folder)
    hub.clear()
    summary, _ = download_here(hub, folder)
    assert (summary.given_back, summary.complete, summary.n_fetched) == ((SHARDS[2],), False, 0)
    assert plan_download(options_for(hub, folder), io.StringIO()).to_json()["given_back"] == [SHARDS[2]]
    assert served(hub) == []
    download_here(hub, folder, include=(SHARDS[2],))
    assert contents(folder) == WANTED
    assert Ledger(SourceFolder(folder).ledger).reclaimed == {}


def test_a_shard_given_back_that_has_changed_since_is_fetched(hub, folder):
    """It is not what the conversion has read."""
    repository = hub.add(REPOSITORY, model_files())
    download_here(hub, folder)
    given_back(folder)
    changed = model_files() | {SHARDS[2]: bytes(50_002)}
    repository.commit({SHARDS[2]: changed[SHARDS[2]]})
    assert download_here(hub, folder)[0].given_back == ()
    assert contents(folder) == changed


def test_globs(hub, folder):
    summary, _ = download_here(hub, folder, include=("*.json", "figures/"), exclude=("tokenizer*",))
    assert set(contents(folder)) == {"config.json", INDEX, "figures/plot.png"}
    assert not summary.complete
    assert set(summary.left_out) == set(WANTED) - {"config.json", INDEX}
    summary, _ = download_here(hub, folder)
    assert summary.complete
    assert contents(folder) == {**WANTED, "figures/plot.png": OTHER_FILES["figures/plot.png"]}


def test_a_glob_for_nothing(hub, folder):
    with pytest.raises(UsageError, match="matches none of"):
        download_here(hub, folder, include=("*.jsn",))
    assert not folder.exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"README.md": b""}, "this is not a checkpoint"),
        ({"config.json": b"{}"}, "no weights in safetensors files"),
        ({"config.json": b"{}", INDEX: b"{"}, "cannot be read as JSON"),
        ({"config.json": b"{}", INDEX: index_of(SHARDS)}, r"3 of 3 shards are absent"),
        ({"config.json": b"{}", INDEX: index_of(("../x",))}, "must give a plain file name"),
    ],
)
def test_a_repository_that_is_no_checkpoint(hub, tmp_path, files, message):
    serve(hub, files)
    with pytest.raises(HubError, match=message):
        download_here(hub, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_repository_with_one_shard(hub, tmp_path):
    files = {"config.json": b"{}", "model.safetensors": bytes(1000), "model.fp32.safetensors": bytes(10)}
    serve(hub, files)
    assert download_here(hub, tmp_path)[0].n_files == 2
    assert set(contents(tmp_path)) == {"config.json", "model.safetensors"}


def test_the_same_file_is_no_folder(hub, folder):
    folder.parent.mkdir()
    folder.write_bytes(b"mine")
    with pytest.raises(DownloadError, match=r"model: is a file; give a folder"):
        download_here(hub, folder)
    assert hub.requests == []


def test_a_path_through_a_file(hub, folder):
    folder.parent.write_bytes(b"mine")
    with pytest.raises(DownloadError, match=r"Not a directory; mend that, then run the same command again"):
        download_here(hub, folder)


def test_a_folder_in_a_files_place(hub, folder):
    (folder / SHARDS[0] / "x").mkdir(parents=True)
    with pytest.raises(DownloadError, match=rf"{SHARDS[0]}.*: Is a directory; mend that"):
        download_here(hub, folder)


def test_a_dry_run_writes_nothing(hub, folder):
    plan = plan_download(options_for(hub, folder, dry_run=True), io.StringIO())
    assert not folder.exists()
    assert served(hub) == [INDEX]
    assert (plan.missing_bytes, plan.present_bytes) == (sum(map(len, WANTED.values())), 0)
    assert abs(plan.free_bytes - free_disk(folder)) < 1 << 30
    found = json.loads(json.dumps(plan.to_json()))
    assert [one["name"] for one in found["files"]][-3:] == list(SHARDS)


def test_a_dead_line_is_spoken_of_while_the_index_is_read(hub, folder, monkeypatch):
    monkeypatch.setattr("download.crew.QUIET_SECONDS", 0.1)
    monkeypatch.setattr("download.crew.POLL_SECONDS", 0.01)
    hub.set_faults(FaultSchedule((Planned(Part.HUB, INDEX, Fault(Kind.STALL, at=10, seconds=None)),)))
    stream = io.StringIO()
    plan_download(options_for(hub, folder), stream)
    assert stream.getvalue().startswith("no new bytes for ")


def test_a_dry_run_counts_what_is_here(hub, folder):
    download_here(hub, folder)
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[1]).write_bytes(b"short")
    part = SourceFolder(folder).part(SHARDS[0])
    part.parent.mkdir()
    part.write_bytes(bytes(20_000))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    plan = plan_download(options_for(hub, folder, dry_run=True), io.StringIO())
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert [file.name for file in plan.missing] == [SHARDS[0], SHARDS[1]]
    assert plan.missing_bytes == 30_000 + 50_001
    assert {file.name for file in plan.proved} == {SHARDS[2], "tiktoken.model"}
    assert plan.present_bytes + plan.missing_bytes == sum(map(len, WANTED.values()))


def test_the_rate_is_bounded(hub, folder):
    began = time.monotonic()
    download_here(hub, folder, max_rate_mb=0.15)
    assert 0.5 < time.monotonic() - began < 4


def test_a_dead_line_is_spoken_of(hub, folder, monkeypatch):
    monkeypatch.setattr("download.crew.QUIET_SECONDS", 0.1)
    monkeypatch.setattr("download.crew.POLL_SECONDS", 0.01)
    stall = Fault(Kind.STALL, at=1000, seconds=None)
    hub.set_faults(FaultSchedule(tuple(Planned(Part.CDN, name, stall) for name in SHARDS)))
    _, said = download_here(hub, folder)
    assert "no new bytes for 0 s; still trying, Ctrl-C stops and keeps all\n" in said
    assert contents(folder) == WANTED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 0}, "--jobs must be from 1 to 64, found 0"),
        ({"jobs": 65}, "--jobs must be from 1 to 64, found 65"),
        ({"min_free_gb": -1.0}, "--min-free must be a number of GB"),
        ({"min_free_gb": float("nan")}, "--min-free must be a number of GB"),
        ({"min_free_gb": float("inf")}, "--min-free must be a number of GB"),
        ({"max_rate_mb": 0.0}, "--max-rate must be a number of MB/s above 0"),
        ({"max_rate_mb": float("nan")}, "--max-rate must be a number of MB/s above 0"),
        ({"revision": ""}, "--revision is empty"),
        ({"dry_run": True, "check": Check.SIZE}, "--dry-run and --check exclude each other"),
    ],
)
def test_options_that_make_no_sense(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        DownloadOptions(repository=REPOSITORY, folder=tmp_path, patience=HASTE, **options)
