"""The real process, killed again and again with SIGKILL: it goes on at the byte, and ends with the right bytes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from download.folder import SourceFolder
from download.ledger import Ledger
from tests.download.served import REPOSITORY
from tests.download.small_model import ROOT, SHARDS, contents, environment, model_files, run_cli
from tests.hub import HubServer, Part

N_KILLS = 10
SHARD_BYTES = 400_000
FILES = model_files(shard_bytes=SHARD_BYTES)


def test_killed_ten_times(hub: HubServer, tmp_path: Path) -> None:
    hub.add(REPOSITORY, FILES)
    hub.set_rate(150_000)
    folder = tmp_path / "model"
    rng = random.Random(4)
    n_resumed = 0
    parts: dict[str, int] = {}
    for _ in range(N_KILLS):
        hub.clear()
        kill_when_more_is_here(hub, folder, tmp_path, rng.randrange(20_000, 90_000))
        n_resumed += check_where_it_went_on(hub, parts)
        parts = part_sizes(folder)
        for name, data in contents(folder).items():
            assert data == FILES[name], name  # what has its final name is whole, at any time
    hub.set_rate(None)
    hub.clear()
    done = run_cli(hub, tmp_path, REPOSITORY, folder)
    assert done.returncode == 0, done.stderr
    check_where_it_went_on(hub, parts)
    assert contents(folder) == FILES
    assert set(Ledger(SourceFolder(folder).ledger).proved) == set(FILES)
    assert n_resumed >= N_KILLS


def kill_when_more_is_here(hub: HubServer, folder: Path, home: Path, more_bytes: int) -> None:
    """Run the command, and kill it when so many bytes more are on disk."""
    goal = sum(part_sizes(folder).values()) + finished_bytes(folder) + more_bytes
    process = subprocess.Popen(
        [sys.executable, "-m", "download", REPOSITORY, folder, "--jobs", "2"],
        cwd=ROOT,
        env=environment(hub, home),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while sum(part_sizes(folder).values()) + finished_bytes(folder) < goal:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def part_sizes(folder: Path) -> dict[str, int]:
    places = SourceFolder(folder)
    return {name: places.part(name).stat().st_size for name in SHARDS if places.part(name).is_file()}


def finished_bytes(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in SHARDS if (folder / name).is_file())


def check_where_it_went_on(hub: HubServer, parts: dict[str, int]) -> int:
    """Each shard's first request begins where its part ended. Returns how many were begun before."""
    n_resumed = 0
    for name in SHARDS:
        asked = [one.range_start for one in hub.of(name, Part.CDN)]
        if asked:
            assert asked == [parts.get(name) or None], name
            n_resumed += parts.get(name, 0) > 0
    return n_resumed
