"""Random schedules of faults and stops: each ends in the right bytes, or says which file it could not get."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from container.errors import DownloadError
from download.fetch import fetch_file
from download.folder import SourceFolder
from download.listing import RemoteFile
from download.transfer import Patience, Stopped
from tests.download.served import HASTE, REPOSITORY, hasty, large_file, small_file
from tests.download.small_model import contents, download_here, serve, wanted_files
from tests.hub import FaultSchedule, HubServer

MODEL = "org/model"
DRAW = random.Random(7)
CONTENTS = {
    "config.json": b"{}" * 300,
    "model-00001-of-00003.safetensors": DRAW.randbytes(60_000),
    "model-00002-of-00003.safetensors": DRAW.randbytes(5_000),
    "model-00003-of-00003.safetensors": DRAW.randbytes(1),
    "tokenizer/vocabulary.txt": DRAW.randbytes(9_000),
}
FILES = [
    (large_file if name.endswith(".safetensors") else small_file)(name, content) for name, content in CONTENTS.items()
]
SIZES = {name: len(content) for name, content in CONTENTS.items()}
# Little patience for stalls: a busy machine may stall, too, and is asked again.
PATIENCE = replace(HASTE, give_up_seconds=20, stall_seconds=0.05, connect_seconds=0.05)
LITTLE_PATIENCE = replace(PATIENCE, give_up_seconds=0.1)  # where giving up is right
N_SCHEDULES, N_SLOW_SCHEDULES = 60, 1000
N_RUNS, N_SLOW_RUNS = 12, 200


@pytest.fixture(autouse=True)
def without_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power cuts are not the subject, and thousands of syncs would be most of the time."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.allow("secret")
        server.add(REPOSITORY, CONTENTS)
        serve(server, repository=MODEL)
        yield server


def fetch(
    hub: HubServer,
    file: RemoteFile,
    folder: SourceFolder,
    *,
    patience: Patience = PATIENCE,
    stop_at: int | None = None,
) -> None:
    """Fetch a file, once more where it was stopped at a byte."""
    url = f"{hub.endpoint}/{REPOSITORY}/resolve/main/{file.name}"
    transfer = hasty(patience)

    def progress(n_bytes: int) -> None:
        if stop_at is not None and n_bytes >= stop_at:
            transfer.stop.set()

    try:
        fetch_file(transfer, url, file, folder, progress=progress)
    except Stopped:
        assert transfer.stop.is_set()
        fetch(hub, file, folder, patience=patience)
    finally:
        transfer.close()


def run_schedule(hub: HubServer, seed: int, folder: SourceFolder) -> tuple[int, int]:
    """(faults that happened, files refused at first) under the schedule of a seed."""
    draw = random.Random(seed)
    n_permanent = draw.choice((0, 0, 0, 1))
    schedule = FaultSchedule.random(
        seed, SIZES, n_faults=10, n_permanent=n_permanent, refusals=draw.random() < 0.5, stall_seconds=(0.02, None)
    )
    hub.set_faults(schedule)
    hub.clear()
    discouraging = {one.name for one in schedule.discouraging}
    refused: dict[str, str] = {}
    for file in FILES:
        stop_at = draw.randrange(file.n_bytes) if draw.random() < 0.3 else None
        patience = LITTLE_PATIENCE if file.name in discouraging else PATIENCE
        try:
            fetch(hub, file, folder, patience=patience, stop_at=stop_at)
        except DownloadError as error:
            refused[file.name] = str(error)
    assert set(refused) <= discouraging, schedule
    assert all(message.startswith(f"{name}: ") for name, message in refused.items())
    assert not [name for name in refused if folder.file(name).exists()]
    assert {one.name for one in schedule.final} <= set(refused), schedule
    happened = sum(one.fault is not None for one in hub.requests)
    hub.set_faults(FaultSchedule())
    for file in FILES:
        if file.name in refused:
            fetch(hub, file, folder)
        assert folder.file(file.name).read_bytes() == CONTENTS[file.name], (file.name, schedule)
    assert not [path for path in folder.state.rglob("*") if path.is_file()]
    return happened, len(refused)


def run_schedules(hub: HubServer, seeds: range, folder: Path) -> None:
    results = [run_schedule(hub, seed, SourceFolder(folder / str(seed))) for seed in seeds]
    n_faults, n_refused = map(sum, zip(*results, strict=True))
    assert n_faults > 3 * len(seeds)
    assert 0 < n_refused < len(seeds)


def test_random_schedules_end_in_the_right_bytes_or_name_the_file(hub: HubServer, tmp_path: Path) -> None:
    run_schedules(hub, range(N_SCHEDULES), tmp_path)


@pytest.mark.slow
def test_many_random_schedules(hub: HubServer, tmp_path: Path) -> None:
    run_schedules(hub, range(N_SCHEDULES, N_SCHEDULES + N_SLOW_SCHEDULES), tmp_path)


def run_whole(hub: HubServer, seed: int, folder: Path) -> bool:
    """A whole download under the schedule of a seed, and another without faults; whether the first one was refused."""
    draw = random.Random(seed)
    wanted = wanted_files()
    schedule = FaultSchedule.random(
        seed,
        {name: len(content) for name, content in wanted.items()},
        n_faults=15,
        n_permanent=draw.choice((0, 0, 1)),
        refusals=draw.random() < 0.5,
        stall_seconds=(0.02, 0.3),  # a stall for ever would take the listing's own time-out, half a minute
    )
    patience = replace(PATIENCE, give_up_seconds=0.2) if schedule.discouraging else PATIENCE
    hub.set_faults(schedule)
    message = None
    try:
        download_here(hub, folder, repository=MODEL, patience=patience, jobs=draw.choice((1, 3)))
    except DownloadError as error:
        message = str(error)
    found = contents(folder)
    assert found.items() <= wanted.items(), schedule
    if message is None:
        assert found == wanted, schedule
    else:
        assert schedule.discouraging, message
        assert all(name in message for name in wanted.keys() - found.keys()) or not found, message
    hub.set_faults(FaultSchedule())
    download_here(hub, folder, repository=MODEL, patience=PATIENCE)
    assert contents(folder) == wanted, schedule
    return message is not None


def test_whole_downloads_under_random_schedules(hub: HubServer, tmp_path: Path) -> None:
    refused = [run_whole(hub, seed, tmp_path / str(seed)) for seed in range(N_RUNS)]
    assert 0 < sum(refused) < N_RUNS


@pytest.mark.slow
def test_many_whole_downloads_under_random_schedules(hub: HubServer, tmp_path: Path) -> None:
    refused = [run_whole(hub, seed, tmp_path / str(seed)) for seed in range(N_RUNS, N_RUNS + N_SLOW_RUNS)]
    assert 0 < sum(refused) < N_SLOW_RUNS
