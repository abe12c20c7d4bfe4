"""A conversion that deletes its source, struck anywhere: it finishes with the same bytes; nothing goes too early."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.convert.reclaiming import Consumers, reclaimed_lines, shards_here, small_files, write_straddling
from tests.convert.small import REPOSITORY, assert_same, contents, convert_here, run_cli
from tests.crash.processes import Running

RECLAIM = ("--reclaim", "on")


def points(source: Path, folder: Path, mode: str, which: str, seconds: float) -> dict[str, list]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.reclaim_points", str(source), str(folder), mode, which],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mode", ["kill", "full"])
def test_where_the_source_is_touched(tmp_path, mode):
    source = write_straddling(tmp_path / "checkpoint", n_shards=3, num_hidden_layers=2, num_experts=2)
    report = points(source, tmp_path, mode, "some", 280)
    labels = report["labels"]
    for shard in shards_here(source):
        gone = labels.index(f"unlink {shard}")
        assert labels[gone - 1] == "fsync ledger.jsonl"  # before it, and nothing between
        assert labels[gone + 1].startswith("fsync whole-source")  # and gone for good before anything else
        kept = labels.index(f"rename to {shard}")
        assert labels[kept - 1 : kept + 3] == [
            f"fsync new {shard}", f"rename to {shard}", "fsync headers", "fsync ledger.jsonl"
        ]  # fmt: skip
    last = max(n for n, label in enumerate(labels) if label.endswith(".safetensors"))
    assert last < labels.index("rename to codebooks.bin")  # assembling needs no shard
    assert len(report["struck"]) > 12


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mode", ["kill", "full"])
def test_every_step(tmp_path, mode):
    source = write_straddling(tmp_path / "checkpoint", n_shards=4, num_experts=2)
    report = points(source, tmp_path, mode, "all", 2900)
    assert len(report["struck"]) == len(report["labels"])


@pytest.fixture
def large(tmp_path) -> tuple[Path, Consumers, dict[str, bytes]]:
    """A checkpoint of five layers whose shards go one after the other, and the container of an untouched copy."""
    source = write_straddling(tmp_path / "checkpoint", n_shards=6, num_hidden_layers=5, num_experts=4)
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    convert_here(copy, tmp_path / "expected", workers=1)
    return source, Consumers(copy, tmp_path / "expected"), contents(tmp_path / "expected")


def strike(source: Path, output: Path, moment: Callable[[], bool]) -> None:
    """SIGKILL the parent as soon as the moment has come, unless the conversion has ended by then."""
    with Running(source, output, *RECLAIM) as run:
        while run.process.poll() is None and not moment():
            time.sleep(0.002)
        run.signal(signal.SIGKILL)
        run.seconds_until_nobody_is_left()


def finish(source: Path, output: Path, expected: dict[str, bytes]) -> None:
    kept = small_files(source)
    done = run_cli(source, output, "--workers", "2", *RECLAIM)
    assert done.returncode == 0, done.stderr
    assert_same(output, expected)
    assert not shards_here(source)
    assert small_files(source) == kept


def assert_nothing_lost(source: Path, output: Path, consumers: Consumers) -> None:
    consumers.assert_safe(source, output)
    assert consumers.tensors.keys() - shards_here(source) <= set(reclaimed_lines(source))


def test_killed_as_shards_go(tmp_path, large):
    """Real processes, with half of the shards gone."""
    source, consumers, expected = large
    strike(source, tmp_path / "out", lambda: len(shards_here(source)) <= 3)
    assert_nothing_lost(source, tmp_path / "out", consumers)
    finish(source, tmp_path / "out", expected)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_at_random_moments(tmp_path, large):
    """Ten conversions, each killed until it is done."""
    source, consumers, expected = large
    rng, n_kills = random.Random(2027), 0
    for number in range(10):
        here, output = Path(shutil.copytree(source, tmp_path / f"source-{number}")), tmp_path / f"out-{number}"
        while not (output / "manifest.json").exists():
            end = time.monotonic() + 1.5 + 4 * rng.random()
            strike(here, output, lambda end=end: time.monotonic() > end)
            assert_nothing_lost(here, output, consumers)
            n_kills += 1
        finish(here, output, expected)
    assert n_kills > 10
