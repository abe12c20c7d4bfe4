"""Conversions of a repository on the hub: the same bytes, each shard once, and never more in staging than the bound."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

import convert.run
from container.errors import BuildError, BusyError, DownloadError, MoedockError, PreflightError, SourceError
from container.fingerprint import sample_ranges
from container.lock import held_lock
from container.progress import size
from container.shards import read_shard_header
from convert.options import ConvertOptions, Remote
from convert.pool import Work
from convert.prepare import dry_run
from download.folder import SourceFolder
from download.ledger import Ledger
from download.options import DownloadOptions
from download.part import Part as PartFile
from download.staging import STAYS_FREE_BYTES, Staging
from tests.checkpoints import checkpoint_tensors, write_checkpoint
from tests.checkpoints.folder import shard_names, write_index, write_side_files
from tests.convert.small import (
    Converted,
    assert_same,
    contents,
    edit_json,
    serial_work,
    small_k3,
    small_kimi_linear,
    write_small,
)
from tests.convert.staged import (
    REPOSITORY_ID,
    MostHeld,
    fetching_threads,
    locally_converted,
    shard_sizes,
    stream_here,
    times_fetched,
    two_largest,
    whole_requests,
)
from tests.download.served import HASTE
from tests.hub import Fault, FaultSchedule, HubServer, Kind, Part, Planned

N_SHARDS, N_LAYERS, N_SAMPLES = 6, 4, 2


def shard(number: int) -> str:
    """Name of one of the six, from 1."""
    return f"model-{number:05d}-of-{N_SHARDS:06d}.safetensors"


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Fingerprints of two pieces instead of sixteen, and two rounds of training: both would take most of the time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("container.fingerprint.SAMPLE_PIECES", N_SAMPLES)
        patched.setattr("convert.codebooks.GREEDY_ALONE", ((65_536, 2),))
        yield


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory, _quick: None) -> Converted:
    """Four layers in six shards (layers 0 and 1 share the first), and their container. Not to be changed."""
    folder = tmp_path_factory.mktemp("six")
    source = write_small(folder / "checkpoint", shards=N_SHARDS, num_hidden_layers=N_LAYERS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(convert.run, "run_work", serial_work)
        return locally_converted(source, folder / "container")


@pytest.fixture
def hub(six: Converted, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with the six shards, and conversions in this process that ask it, impatiently."""
    with HubServer() as server:
        server.add(REPOSITORY_ID, six.source)
        options = functools.partial(DownloadOptions, endpoint=server.endpoint, patience=HASTE)
        monkeypatch.setattr("convert.staged_supply.DownloadOptions", options)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(convert.run, "run_work", serial_work)
        yield server
    assert not fetching_threads()


def refused(staging: Path, output: Path, *, error: type[MoedockError], **options: Any) -> str:
    """What a conversion says that is refused before it writes anything into OUT but its build folder."""
    with pytest.raises(error) as caught:
        stream_here(staging, output, **options)
    assert not (output / "manifest.json").exists()
    return str(caught.value)


@pytest.mark.parametrize("room", ["one", "two"])
def test_the_container_is_the_local_one(tmp_path, monkeypatch, hub, six, room):
    sizes = shard_sizes(six.source)
    bound = {"one": max(sizes.values()), "two": two_largest(six.source)}[room]
    most = MostHeld(tmp_path / "staging", monkeypatch)
    summary, log = stream_here(tmp_path / "staging", tmp_path / "out", staging_bytes=bound)
    assert summary.complete
    assert_same(tmp_path / "out", six.files)
    assert times_fetched(hub) == dict.fromkeys(sizes, 1)
    assert max(sizes.values()) <= most.n_bytes <= bound
    assert shard_sizes(tmp_path / "staging") == {}
    assert {name for name in sizes if f"gave back {name}: " in log} == set(sizes)
    assert {name for name in sizes if f"fetched {name}: " in log} == set(sizes)


def test_the_origin_is_in_the_report(tmp_path, hub, six):
    stream_here(tmp_path / "staging", tmp_path / "out", revision="main")
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    commit = Ledger(SourceFolder(tmp_path / "staging").ledger).origin
    assert commit is not None
    assert report["origin"] == {"repository": REPOSITORY_ID, "revision": commit.revision}


def test_shards_come_in_the_order_that_jobs_need_them(tmp_path, monkeypatch, hub, six):
    """What is outside the layers first (its shards are the last three), then layer by layer."""
    monkeypatch.setattr("download.staging.CONNECTIONS", 1)
    stream_here(tmp_path / "staging", tmp_path / "out")
    order = [int(one.name[6:11]) for one in whole_requests(hub)]
    assert sorted(order[:3]) == [4, 5, 6]
    assert order[3:] == [1, 2, 3]


def test_a_shard_that_two_layers_need_stays_for_the_second(tmp_path, hub, six):
    """One of the layers of the first shard now, the other later: the shard waits in the staging folder."""
    bound = two_largest(six.source)
    stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({1}), staging_bytes=bound)
    assert list(shard_sizes(tmp_path / "staging")) == [shard(1)]
    stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({2, 3}), staging_bytes=bound)
    assert list(shard_sizes(tmp_path / "staging")) == [shard(1)]
    assert sorted(times_fetched(hub)) == [shard(1), shard(2), shard(3)]
    summary, _ = stream_here(tmp_path / "staging", tmp_path / "out", staging_bytes=bound)
    assert summary.complete
    assert_same(tmp_path / "out", six.files)
    assert times_fetched(hub) == dict.fromkeys(shard_sizes(six.source), 1)


def test_layers_that_are_done_ask_for_nothing(tmp_path, hub):
    stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({3}))
    hub.clear()
    summary, _ = stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({3}))
    assert summary.n_jobs_done == 0
    assert [one.name for one in hub.requests if one.name.endswith(".safetensors")] == []


def test_a_finished_layer_that_does_not_hold_is_fetched_again(tmp_path, hub):
    stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({3}))
    bank = tmp_path / "out" / "experts-L3.bin"
    sound = bank.read_bytes()
    bank.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    summary, log = stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({3}))
    assert "does not match its checksum; converting it again" in log
    assert (summary.n_jobs_done, times_fetched(hub)) == (1, {shard(3): 2})
    assert bank.read_bytes() == sound


def test_a_finished_container_asks_for_no_shard(tmp_path, hub, six):
    stream_here(tmp_path / "staging", tmp_path / "out")
    hub.clear()
    summary, _ = stream_here(tmp_path / "staging", tmp_path / "out")
    assert summary.already_complete
    assert [one.name for one in hub.requests if one.name.endswith(".safetensors")] == []
    assert_same(tmp_path / "out", six.files)


def test_another_container_of_the_same_staging_folder(tmp_path, hub, six):
    for name in ("out", "second"):
        stream_here(tmp_path / "staging", tmp_path / name, layers=frozenset({3}))
        assert (tmp_path / name / "experts-L3.bin").read_bytes() == six.files["experts-L3.bin"]
    assert times_fetched(hub) == {shard(3): 2}
    assert shard_sizes(tmp_path / "staging") == {}


def test_a_repository_of_one_file(tmp_path, hub):
    source = write_checkpoint(tmp_path / "single", small_k3(), single_file=True)
    local = locally_converted(source, tmp_path / "local")
    hub.add("org/single", source)
    stream_here(tmp_path / "staging", tmp_path / "out", "org/single")
    assert_same(tmp_path / "out", local.files)
    assert times_fetched(hub) == {"model.safetensors": 1}
    assert shard_sizes(tmp_path / "staging") == {}


def straddling(folder: Path, n_shards: int) -> Path:
    """A Kimi-Linear whose tensors fill shards of equal count, wherever its layers end."""
    config = small_kimi_linear()
    folder.mkdir()
    tensors, names = checkpoint_tensors(config), shard_names(config, n_shards)
    of = {tensor: names[n * n_shards // len(tensors)] for n, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in tensors if of[tensor] == name}, folder / name)
    write_index(folder, of, sum(array.nbytes for array in tensors.values()), seed=0)
    write_side_files(folder, config)
    return folder


def test_layers_that_straddle_shards(tmp_path, monkeypatch, hub):
    source = straddling(tmp_path / "straddling", 5)
    local = locally_converted(source, tmp_path / "local")
    hub.add("org/straddling", source)
    most = MostHeld(tmp_path / "staging", monkeypatch)
    stream_here(tmp_path / "staging", tmp_path / "out", "org/straddling", staging_bytes=two_largest(source))
    assert_same(tmp_path / "out", local.files)
    assert times_fetched(hub) == dict.fromkeys(shard_sizes(source), 1)
    assert max(shard_sizes(source).values()) < most.n_bytes <= two_largest(source)


def planned(staging: Path, output: Path, repository: str = REPOSITORY_ID, **options: Any) -> dict[str, Any]:
    """What a dry run finds."""
    return dry_run(
        ConvertOptions(source=staging, output=output, remote=Remote(repository, None), **options), io.StringIO()
    )


def test_a_dry_run(tmp_path, hub, six):
    before = contents(tmp_path)
    plan = planned(tmp_path / "staging", tmp_path / "out")
    assert contents(tmp_path) == before
    assert list(tmp_path.iterdir()) == []
    assert (plan["problems"], plan["shards_absent"], plan["names_only"]) == ([], N_SHARDS, True)
    assert any(note.startswith(f"6 shards, 1.2 MiB, would come from {REPOSITORY_ID} at ") for note in plan["notes"])
    assert any(note.startswith("staging needs 0.576 MB at least, and may take 60 GB") for note in plan["notes"])
    assert not [note for note in plan["notes"] if "in the checkpoint" in note]  # the small files were looked at
    assert not [one for one in hub.requests if one.name.endswith(".safetensors")]


def test_a_dry_run_of_one_file(tmp_path, hub):
    hub.add("org/single", write_checkpoint(tmp_path / "single", small_k3(), single_file=True))
    plan = planned(tmp_path / "staging", tmp_path / "out", "org/single")
    assert plan["problems"] == []
    assert whole_requests(hub) == []
    assert not (tmp_path / "staging").exists()


def test_a_dry_run_says_that_the_bound_is_too_small(tmp_path, hub):
    (problem,) = planned(tmp_path / "staging", tmp_path / "out", staging_bytes=1000)["problems"]
    assert problem.startswith("--staging-size 0.001 MB: too small")


def test_a_dry_run_looks_at_the_staging_folder(tmp_path, hub, six):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(SourceError, match=r"holds thesis\.txt"):
        planned(tmp_path / "mine", tmp_path / "out")


def test_the_bound_is_too_small(tmp_path, hub, six):
    """Said beforehand, with the least that would do; and that is enough."""
    least = max(shard_sizes(six.source).values())
    message = refused(tmp_path / "staging", tmp_path / "out", error=PreflightError, staging_bytes=least - 1)
    assert "too small, 0.576 MB of shards must be there at once for L0" in message
    assert whole_requests(hub) == []
    stream_here(tmp_path / "staging", tmp_path / "out", staging_bytes=least)
    assert_same(tmp_path / "out", six.files)


def test_the_staging_disk_is_too_small(tmp_path, monkeypatch, hub, six):
    monkeypatch.setattr("convert.staged_supply.same_disk", lambda one, other: False)
    monkeypatch.setattr("convert.staged_supply.free_disk", lambda folder: 500 << 20)
    message = refused(tmp_path / "staging", tmp_path / "out", error=PreflightError)
    needed = 2 * STAYS_FREE_BYTES + sum(shard_sizes(six.source).values())
    assert f"disk: {size(needed)} needed at {tmp_path / 'staging'} for staging, 500.0 MiB free" in message


def test_a_folder_of_somebody_is_not_emptied(tmp_path, hub, six):
    """A checkpoint that lies there already would lose its shards one by one."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for name, data in contents(six.source).items():
        (mine / name).write_bytes(data)
    before = contents(mine)
    message = refused(mine, tmp_path / "out", error=SourceError)
    assert message.startswith(f"staging {mine}: holds config.json, generation_config.json, ")
    assert "--reclaim on" in message
    assert contents(mine) == before


def test_a_download_that_has_only_begun_is_not_taken_over(tmp_path, hub):
    folder = SourceFolder(tmp_path / "mine")
    folder.state.mkdir(parents=True)
    folder.ledger.write_text('{"event": "source", "repository": "org/name", "revision": "0", "time": ""}\n')
    folder.parts.mkdir()
    message = refused(tmp_path / "mine", tmp_path / "out", error=SourceError)
    assert "holds a download and was not made by a conversion" in message


def test_staging_is_a_file(tmp_path, hub):
    (tmp_path / "file").write_text("")
    message = refused(tmp_path / "file", tmp_path / "out", error=SourceError)
    assert message == f"staging {tmp_path / 'file'}: is not a folder"


def test_an_empty_folder_is_taken(tmp_path, hub, six):
    (tmp_path / "staging").mkdir()
    stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({0}))
    assert (tmp_path / "out" / ".build" / "done-L0.json").exists()


def test_another_repository_in_the_same_staging_folder(tmp_path, hub, six):
    stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({0}))
    hub.add("org/other", six.source)
    message = refused(tmp_path / "staging", tmp_path / "second", error=SourceError, repository="org/other")
    assert message == f"staging {tmp_path / 'staging'}: belongs to {REPOSITORY_ID}; choose another folder"


def test_a_second_conversion_in_the_same_staging_folder(tmp_path, hub):
    with held_lock(SourceFolder(tmp_path / "staging").lock, "it"):
        message = refused(tmp_path / "staging", tmp_path / "out", error=BusyError)
    assert f"(process {os.getpid()} on " in message
    assert not (tmp_path / "out").exists()


def test_the_revision_moves_between_two_runs(tmp_path, hub, six):
    """Without a revision the first commit is kept to; with one it is an error to mix them."""
    repository = hub.add(REPOSITORY_ID, six.source)
    stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({0}), revision="main")
    began = repository.find("main")
    assert began is not None
    moved = write_small(tmp_path / "moved", shards=N_SHARDS, num_hidden_layers=N_LAYERS)
    edit_json(moved / "config.json", lambda config: config.update(moved=True))
    repository.commit(moved)
    message = refused(tmp_path / "staging", tmp_path / "out", error=DownloadError, revision="main")
    assert f"begun with commit {began.sha}, but the revision asked for is now " in message
    stream_here(tmp_path / "staging", tmp_path / "out")
    assert_same(tmp_path / "out", six.files)


def broken(name: str, fault: Fault) -> FaultSchedule:
    """One file of the storage that never comes again; its header was read before."""
    return FaultSchedule((Planned(Part.CDN, name, fault, 0, None),))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(Kind.STATUS, status=404), "HTTP 404"),
        (Fault(Kind.STATUS, status=500), "no more have come"),
        (Fault(Kind.FLIP, at=100_000), "twice in a row"),
    ],
    ids=["gone", "down", "damaged"],
)
def test_a_shard_that_does_not_come(tmp_path, hub, six, fault, words):
    """The layers whose shards are here are finished, the error names the shard, and later the same command goes on."""
    stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({0}))
    hub.set_faults(broken(shard(3), fault))
    hub.clear()
    message = refused(tmp_path / "staging", tmp_path / "out", error=DownloadError)
    assert message.startswith(f"{shard(3)}: ")
    assert words in message
    hub.set_faults(FaultSchedule())
    hub.clear()
    summary, _ = stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({0, 3}))
    assert (summary.n_jobs_done, summary.n_jobs_left) == (1, 0)  # all that could be done was
    assert times_fetched(hub).keys() <= {shard(3)}
    assert_same(tmp_path / "out", six.files)


def test_the_hub_goes_away(tmp_path, hub, six):
    """In the middle of all: what was fetched is used, then one sentence."""
    hub.set_faults(FaultSchedule((Planned(Part.CDN, None, Fault(Kind.DROP), N_SHARDS * (1 + N_SAMPLES) + 4, None),)))
    message = refused(tmp_path / "staging", tmp_path / "out", error=DownloadError)
    assert "run the same command to continue" in message
    done = {path.name for path in (tmp_path / "out" / ".build").glob("done-*.json")}
    assert done
    hub.set_faults(FaultSchedule())
    stream_here(tmp_path / "staging", tmp_path / "out")
    assert_same(tmp_path / "out", six.files)


def test_the_hub_goes_away_before_the_headers_are_read(tmp_path, hub):
    """No header's turn waits for the patience of another."""
    hub.set_faults(FaultSchedule((Planned(Part.CDN, None, Fault(Kind.STATUS, status=404), 3, None),)))
    message = refused(tmp_path / "staging", tmp_path / "out", error=DownloadError)
    assert "HTTP 404" in message
    assert not (tmp_path / "out").exists()


def test_a_header_that_differs_from_the_shard(tmp_path, hub, six):
    """A sample came damaged while headers were read: the shard is right, and is not taken for the one expected."""
    path = six.source / shard(2)
    offset, _ = sample_ranges(read_shard_header(path).data_offset, path.stat().st_size)[1]
    hub.set_faults(FaultSchedule((Planned(Part.CDN, shard(2), Fault(Kind.FLIP, at=offset), 2),)))
    message = refused(tmp_path / "staging", tmp_path / "out", error=DownloadError)
    assert message.startswith(f"{tmp_path / 'staging' / shard(2)}: its header or its weights are not those")


def test_a_header_that_is_none(tmp_path, hub):
    hub.set_faults(FaultSchedule((Planned(Part.CDN, shard(2), Fault(Kind.FLIP, at=7), 0),)))
    message = refused(tmp_path / "staging", tmp_path / "out", error=SourceError)
    assert f"{shard(2)}: header of " in message


def test_killed_between_the_shard_and_its_proof(tmp_path, monkeypatch, hub, six):
    """Its bytes are read, not fetched again."""
    staging = tmp_path / "staging"
    stream_here(staging, tmp_path / "out", layers=frozenset({0}))
    (staging / shard(2)).write_bytes((six.source / shard(2)).read_bytes())
    hub.clear()
    most = MostHeld(staging, monkeypatch)
    stream_here(staging, tmp_path / "out", staging_bytes=two_largest(six.source))
    assert_same(tmp_path / "out", six.files)
    assert shard(2) not in times_fetched(hub)
    assert most.n_bytes <= two_largest(six.source)


def test_killed_before_a_shard_goes(tmp_path, monkeypatch, hub, six):
    """Its layers were finished: the next run deletes it first of all, and never asks for it."""
    staging = tmp_path / "staging"
    only_last = frozenset({3})

    def killed(self: Staging, name: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "give_back", killed)
        with pytest.raises(KeyboardInterrupt):
            stream_here(staging, tmp_path / "out", layers=only_last)
    assert list(shard_sizes(staging)) == [shard(3)]
    hub.clear()
    _, log = stream_here(staging, tmp_path / "out", layers=only_last)
    assert shard_sizes(staging) == {}
    assert f"gave back {shard(3)}: " in log
    assert whole_requests(hub) == []


def test_a_damaged_shard_makes_room_for_the_right_one(tmp_path, monkeypatch, hub, six):
    staging = tmp_path / "staging"
    stream_here(staging, tmp_path / "out", layers=frozenset({0}))
    (staging / shard(1)).unlink()
    damaged = bytearray((six.source / shard(1)).read_bytes())
    damaged[300_000] ^= 1
    (staging / shard(1)).write_bytes(damaged)
    Ledger(SourceFolder(staging).ledger).say_disproved(shard(1))
    hub.clear()
    most = MostHeld(staging, monkeypatch)
    bound = shard_sizes(six.source)[shard(1)]
    stream_here(staging, tmp_path / "out", staging_bytes=bound)
    assert_same(tmp_path / "out", six.files)
    assert times_fetched(hub)[shard(1)] == 1
    assert most.n_bytes <= bound


def test_shards_of_an_earlier_run_come_first(tmp_path, monkeypatch, hub, six):
    """A whole shard and a part of the last layers lie there: their layers are converted before others are fetched."""
    staging = tmp_path / "staging"
    stream_here(staging, tmp_path / "out", layers=frozenset({0}))
    hub.set_faults(broken(shard(3), Fault(Kind.STALL, at=60_000)))
    monkeypatch.setattr(convert.run, "run_work", interrupted_once_both_are_here(staging))
    with pytest.raises(KeyboardInterrupt):
        stream_here(staging, tmp_path / "out", layers=frozenset({2, 3}))
    assert fetching_threads() == []
    hub.set_faults(FaultSchedule())
    hub.clear()
    monkeypatch.setattr(convert.run, "run_work", serial_work)
    monkeypatch.setattr("download.staging.CONNECTIONS", 1)
    bound = two_largest(six.source)
    most = MostHeld(staging, monkeypatch)
    stream_here(staging, tmp_path / "out", staging_bytes=bound)
    assert_same(tmp_path / "out", six.files)
    requests = whole_requests(hub)
    assert [one.name for one in requests][:1] == [shard(3)]
    assert requests[0].range_start is not None
    assert shard(2) not in times_fetched(hub)
    assert most.n_bytes <= bound


def interrupted_once_both_are_here(staging: Path) -> Any:
    """In place of the pool: waits for shard 2 and a part of shard 3, then Ctrl-C."""

    def work(work: Work[Any, Any], watcher: Any, *, n_workers: int, feed: Any = None) -> None:
        if feed is None:  # earlier layers are proved first
            return serial_work(work, watcher, n_workers=n_workers)
        folder = SourceFolder(staging)
        part, deadline = folder.part(shard(3)), time.monotonic() + 10
        while not (folder.file(shard(2)).exists() and part.is_file() and part.stat().st_size >= 60_000):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        raise KeyboardInterrupt

    return work


def test_a_full_disk_while_shards_come(tmp_path, monkeypatch, hub, six):
    staging = tmp_path / "staging"
    append = PartFile.append

    def full(part: PartFile, block: bytes) -> None:
        if part._file.name == shard(3):
            raise OSError(errno.ENOSPC, "No space left on device")
        append(part, block)

    with monkeypatch.context() as patched:
        patched.setattr(PartFile, "append", full)
        message = refused(staging, tmp_path / "out", error=DownloadError)
    assert message == (
        f"staging {staging}: No space left on device; what was fetched is kept, run the same command to continue"
    )
    stream_here(staging, tmp_path / "out")
    assert_same(tmp_path / "out", six.files)


def test_a_full_disk_before(tmp_path, monkeypatch, hub):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PartFile, "append", full)
    message = refused(tmp_path / "staging", tmp_path / "out", error=DownloadError)
    assert message.startswith(f"{tmp_path / 'staging'}: the disk is full (")


def test_little_is_left_on_the_disk(tmp_path, monkeypatch, hub):
    monkeypatch.setattr("download.staging.free_disk", lambda folder: 200 << 20)
    message = refused(tmp_path / "staging", tmp_path / "out", error=DownloadError)
    assert message.startswith(f"{tmp_path / 'staging'}: only 200.0 MiB free, ")
    assert message.endswith("run the same command to continue")


def test_a_worker_that_fails_ends_the_fetching(tmp_path, monkeypatch, hub, six):
    """Also of threads that wait for room, since the first layers' shard does not fit beside the last three."""
    staging = tmp_path / "staging"

    def fail(job: Any, progress: Any) -> None:
        deadline = time.monotonic() + 10
        while len(shard_sizes(staging)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise BuildError("the third layer")

    monkeypatch.setattr(convert.run, "convert_job", fail)
    with pytest.raises(BuildError, match="the third layer"):
        stream_here(staging, tmp_path / "out", staging_bytes=two_largest(six.source))
    assert fetching_threads() == []


def test_real_workers(tmp_path, monkeypatch, hub, six):
    """Several processes, and shards that come slowly enough for jobs to wait."""
    monkeypatch.undo()
    options = functools.partial(DownloadOptions, endpoint=hub.endpoint, patience=HASTE)
    monkeypatch.setattr("convert.staged_supply.DownloadOptions", options)
    local = locally_converted(six.source, tmp_path / "local", workers=1)  # the processes know nothing of `_quick`
    hub.set_rate(2_000_000)
    summary, log = stream_here(tmp_path / "staging", tmp_path / "out", staging_bytes=two_largest(six.source), workers=2)
    assert summary.complete
    assert_same(tmp_path / "out", local.files)
    assert times_fetched(hub) == dict.fromkeys(shard_sizes(six.source), 1)
    assert sorted(line for line in log.splitlines() if line.startswith("gave back ")) == [
        f"gave back {name}: {size(n_bytes)}" for name, n_bytes in shard_sizes(six.source).items()
    ]
