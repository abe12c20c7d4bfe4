"""Killed, or out of disk, before steps that sync, rename or remove a file: the rest repairs it, nothing is repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.checkpoints import write_checkpoint
from tests.convert.small import REPOSITORY, assert_same, run_cli, small_k3

# Everything that is published, in order, for one dense and one MoE layer.
PUBLISHED = [
    "rename to build.json", "fsync trunk.bin", "rename to done-outside-1.json", "rename to done-L0.json",
    "rename to codebooks-L1.bin", "rename to experts-L1.bin", "rename to done-L1.json", "rename to codebooks.bin",
    "rename to tokenizer.model", "rename to specials.json", "rename to chat.json", "rename to vision.json",
    "rename to report.json", "rename to report.html", "rename to trunk.bin", "rename to manifest.json",
    "unlink build.json", "rmdir .build",
]  # fmt: skip


def run_points(*arguments, seconds: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.crash.publish_points", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def struck(folder, mode, which, seconds) -> tuple[list[str], list[int]]:
    """Labels of all steps, and the numbers of those struck at."""
    source = write_checkpoint(folder / "checkpoint", small_k3(num_hidden_layers=2, num_experts=2))
    done = run_points(source, folder, mode, which, seconds=seconds)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    return report["labels"], report["struck"]


@pytest.mark.parametrize(("mode", "least"), [("kill", 35), ("full", 15)])
def test_every_kind_of_step(tmp_path, mode, least):
    labels, numbers = struck(tmp_path, mode, "some", 280)
    assert len(numbers) >= least
    places = [labels.index(label) for label in PUBLISHED if not label.startswith("unlink")]
    assert places == sorted(places)
    assert set(PUBLISHED) <= set(labels)
    for name in ("done-L1.json", "experts-L1.bin", "manifest.json", "codebooks.bin"):
        renamed = labels.index(f"rename to {name}")
        assert labels[renamed - 1] == f"fsync new {name}"  # no name before its bytes
        assert labels[renamed + 1].startswith("fsync ")  # and the folder after it
    trunk_synced = [n for n, label in enumerate(labels) if label == "fsync trunk.bin"]
    assert trunk_synced[1] < labels.index("rename to done-outside-1.json")  # slices are durable before their record


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["kill", "full"])
def test_every_step(tmp_path, mode):
    labels, numbers = struck(tmp_path, mode, "all", 800)
    assert len(numbers) == len(labels)


@pytest.mark.parametrize(
    ("label", "n_jobs"),
    [
        ("rename to done-L1.json", 2),
        ("rename to manifest.json", 0),  # trunk.bin stands under its final name already
    ],
)
def test_the_command_itself_goes_on(tmp_path, k3, label, n_jobs):
    """With its own workers."""
    killed = run_points(k3.source, tmp_path / "out", "kill", label)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_cli(k3.source, tmp_path / "out", "--workers", "2", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["n_jobs_done"] == n_jobs
    assert_same(tmp_path / "out", k3.files)
