"""Conversions of a repository on the hub, killed again and again, over lines that break: the same bytes in the end."""

from __future__ import annotations

import functools
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import convert.run
from container.errors import MoedockError
from download.folder import SourceFolder
from download.ledger import Ledger
from download.options import DownloadOptions
from tests.convert.small import Converted, assert_same, serial_work, write_small
from tests.convert.staged import (
    REPOSITORY_ID,
    fetching_threads,
    locally_converted,
    shard_sizes,
    staged_bytes,
    stream_here,
    times_fetched,
    two_largest,
    whole_requests,
)
from tests.crash.processes import Running
from tests.download.served import HASTE
from tests.hub import FaultSchedule, HubServer, Part

N_SHARDS, N_KILLS = 8, 5
BYTES_PER_SECOND = 400_000


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Six layers in eight shards, and their container. Not to be changed."""
    folder = tmp_path_factory.mktemp("eight")
    source = write_small(folder / "checkpoint", shards=N_SHARDS, num_hidden_layers=6)
    return locally_converted(source, folder / "container", workers=1)


@pytest.fixture
def hub(eight: Converted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub with the eight shards, that every process started here asks."""
    with HubServer() as server:
        server.add(REPOSITORY_ID, eight.source)
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield server


class Watch:
    """What must not happen, looked for at every request: too much in staging, or a shard asked for that had gone."""

    def __init__(self, hub: HubServer, staging: Path) -> None:
        self.most_bytes = 0
        self.asked_again: list[str] = []
        self._staging = staging
        self._hub = hub
        hub.on_request = self._look

    def _look(self, part: Part, name: str) -> None:
        # twice: a shard may go, and another grow, while one look is taken
        self.most_bytes = max(self.most_bytes, min(staged_bytes(self._staging), staged_bytes(self._staging)))
        if part is Part.CDN and name in Ledger(SourceFolder(self._staging).ledger).reclaimed:
            self.asked_again.append(name)

    def sent_bytes(self, sizes: dict[str, int]) -> int:
        """Bytes of shards that went out so far, headers and samples among them."""
        return sum(map(self._hub.bytes_sent, sizes))


def start(staging: Path, output: Path, bound: int) -> Running:
    """The command, on the hub of HF_ENDPOINT."""
    address = f"hf://{REPOSITORY_ID}"
    return Running(address, output, "--staging", str(staging), "--staging-size", str(bound))  # type: ignore[arg-type]


def killed(run: Running, watch: Watch, sizes: dict[str, int], at_bytes: int, later_seconds: float) -> None:
    """SIGKILL the parent once so many bytes have gone out, and a moment later."""
    run.wait_until(lambda: watch.sent_bytes(sizes) >= at_bytes)
    time.sleep(later_seconds)
    run.signal(signal.SIGKILL)
    run.seconds_until_nobody_is_left()


def whole_path(tmp_path: Path, hub: HubServer, eight: Converted, seed: int) -> None:
    """Killed five times while shards come, go and are converted; two of eight fit."""
    staging, output, rng = tmp_path / "staging", tmp_path / "out", random.Random(seed)
    sizes, bound = shard_sizes(eight.source), two_largest(eight.source)
    hub.set_rate(BYTES_PER_SECOND)
    watch = Watch(hub, staging)
    total = sum(sizes.values())
    headers = total + 16 * 4096 * len(sizes)  # the shards are so small that reading the headers brings them whole
    moments = sorted(rng.uniform(0.02, 0.98) for _ in range(N_KILLS))
    for moment in moments:
        with start(staging, output, bound) as run:
            killed(run, watch, sizes, headers + int(moment * total), rng.choice((0.0, 0.3)))
    with start(staging, output, bound) as run:
        code, _, stderr = run.finish(seconds=120)
    assert code == 0, stderr
    assert_same(output, eight.files)
    assert watch.most_bytes <= bound
    assert watch.asked_again == []
    assert shard_sizes(staging) == {}
    for name, n_bytes in sizes.items():
        came = sum(one.bytes_sent for one in whole_requests(hub) if one.name == name)
        assert came < 2 * n_bytes, name  # what a kill lost on the way, but never a whole shard again
    assert set(times_fetched(hub)) == set(sizes)


def test_the_whole_path_killed_five_times(tmp_path, hub, eight):
    whole_path(tmp_path, hub, eight, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_other_moments(tmp_path, hub, eight, seed):
    whole_path(tmp_path, hub, eight, seed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted_while_shards_come(tmp_path, hub, eight, number):
    """It ends at once, whatever the lines do; and goes on later."""
    watch = Watch(hub, tmp_path / "staging")
    sizes, bound = shard_sizes(eight.source), two_largest(eight.source)
    with start(tmp_path / "staging", tmp_path / "out", bound) as run:
        run.wait_until(lambda: (tmp_path / "out" / ".build" / "lock").exists())
        hub.set_rate(20_000)
        sent = watch.sent_bytes(sizes)
        run.wait_until(lambda: watch.sent_bytes(sizes) > sent + 10_000)
        run.signal_all(number)
        code, stdout, stderr = run.finish(seconds=20)
        assert (code, stdout) == (130, "")
        assert "Traceback" not in stderr
        assert stderr.splitlines()[-1] == "interrupted; finished layers are kept, run the same command to continue"
        assert run.seconds_until_nobody_is_left() < 2


@pytest.fixture
def hasty_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """Conversions in this process that lose patience in milliseconds."""
    options = functools.partial(DownloadOptions, endpoint=hub.endpoint, patience=HASTE)
    monkeypatch.setattr("convert.staged_supply.DownloadOptions", options)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(convert.run, "run_work", serial_work)
    return hub


def faults_of(eight: Converted, seed: int) -> FaultSchedule:
    """On shards only: the listing's patience is not ours to shorten."""
    drawn = FaultSchedule.random(seed, shard_sizes(eight.source), n_faults=12, refusals=False)
    return FaultSchedule(tuple(one for one in drawn.planned if one.part is not Part.API))


def lines_that_break(tmp_path: Path, hub: HubServer, eight: Converted, seed: int) -> None:
    """Faults on the shards, their headers known: it ends as if there were none."""
    bound = two_largest(eight.source)
    hub.set_faults(FaultSchedule())
    stream_here(tmp_path / "staging", tmp_path / "out", layers=frozenset({0}), staging_bytes=bound)
    hub.set_faults(faults_of(eight, seed))
    summary, _ = stream_here(tmp_path / "staging", tmp_path / "out", staging_bytes=bound)
    assert summary.complete
    assert_same(tmp_path / "out", eight.files)
    assert fetching_threads() == []


def lines_that_break_from_the_start(tmp_path: Path, hub: HubServer, eight: Converted, seed: int) -> bool:
    """Headers may come damaged, which shows: a refusal in clear words, or the right bytes. True for these."""
    hub.set_faults(faults_of(eight, seed))
    said = ""
    try:
        stream_here(tmp_path / "staging", tmp_path / "out", staging_bytes=two_largest(eight.source))
    except MoedockError as error:
        said = str(error)
    assert fetching_threads() == []
    if said:
        assert ".safetensors" in said
        assert not (tmp_path / "out" / "manifest.json").exists()
        return False
    assert_same(tmp_path / "out", eight.files)
    return True


def test_lines_that_break(tmp_path, hasty_hub, eight):
    lines_that_break(tmp_path, hasty_hub, eight, seed=0)


def test_lines_that_break_from_the_start(tmp_path, hasty_hub, eight):
    assert lines_that_break_from_the_start(tmp_path, hasty_hub, eight, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_lines_that_break(tmp_path, hasty_hub, eight):
    for seed in range(100, 160):
        lines_that_break(tmp_path / str(seed), hasty_hub, eight, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_lines_that_break_from_the_start(tmp_path, hasty_hub, eight):
    found = [lines_that_break_from_the_start(tmp_path / str(n), hasty_hub, eight, n) for n in range(100, 160)]
    assert sum(found) > len(found) / 2  # damaged headers are rare
