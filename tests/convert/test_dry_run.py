"""Planning without writing, the released K3 included: from its names and config alone, quickly and in little memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from container.checkpoint import Checkpoint
from container.layout import VQ3R
from convert.arch import detect
from convert.plan import plan_conversion
from convert.quality import Quality
from tests.convert.small import REPOSITORY, convert_here, dry_run_here, write_small

K3_DATA = REPOSITORY.parent / "shared" / "data" / "k3"
needs_k3_data = pytest.mark.skipif(not K3_DATA.is_dir(), reason="the released config and index are not here")
GIB = 1 << 30

KEYS = {
    "arch", "format", "layers", "moe_layers", "experts_per_layer", "n_tensors", "n_weights", "file_bytes",
    "records_bytes", "total_bytes", "workers", "threads_per_worker", "peak_memory_bytes", "free_disk_bytes",
    "room_bytes", "shards_absent", "names_only", "notes", "problems",
}  # fmt: skip

# Runs a dry run in a process of its own and reports on it: its result, its peak memory and its time.
MEASURED = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
done = subprocess.run([sys.executable, "-m", "convert", *sys.argv[1:], "--dry-run", "--json"], stdout=subprocess.PIPE)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, json.loads(done.stdout), usage.ru_maxrss * 1024, time.perf_counter() - start]))
"""


@needs_k3_data
def test_the_released_k3(tmp_path, record_property):
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, K3_DATA, tmp_path / "out"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        check=True,
    )
    code, plan, peak_bytes, seconds = json.loads(done.stdout)
    record_property("seconds", seconds)  # shown, not asserted: machines differ and are shared
    record_property("peak_bytes", peak_bytes)
    print(f"{seconds:.1f} s, {peak_bytes / 1e6:.0f} MB")
    assert code == 0
    assert peak_bytes < 1e9
    assert (plan["names_only"], plan["shards_absent"], plan["problems"]) == (True, 96, [])
    assert plan["n_tensors"] == 497_220
    assert plan["layers"] == list(range(93))
    assert (plan["moe_layers"], plan["experts_per_layer"]) == (92, 896)
    assert plan["records_bytes"] == 82_432 * 12_406_784
    assert round(plan["records_bytes"] / GIB, 1) == 952.5
    assert round(plan["total_bytes"] / GIB, 1) == 981.6
    assert plan["n_weights"] == 2_779_931_837_184
    assert not (tmp_path / "out").exists()


@needs_k3_data
def test_the_released_k3_plan_by_hand():
    """Bytes of the banks and codebooks as docs/FORMAT.md gives them for K3."""
    plan = plan_conversion(detect(Checkpoint.open(K3_DATA).config), VQ3R, 4)
    assert {bank.n_bytes for bank in plan.banks.values()} == {896 * 3_029 * 4096}
    assert plan.codebooks_bytes == 92 * 9 * (16 + 256 * 16)
    assert plan.trunk_bytes == plan.total_bytes - 92 * 896 * 3_029 * 4096 - plan.codebooks_bytes


def test_keys(k3, tmp_path):
    plan = dry_run_here(k3.source, tmp_path / "out", workers=2, layers=frozenset({1}))
    assert set(plan) == KEYS
    assert (plan["layers"], plan["workers"], plan["problems"], plan["notes"]) == ([1], 1, [], [])
    assert plan["total_bytes"] == sum(plan["file_bytes"].values()) == k3.summary.container_bytes
    assert list(tmp_path.iterdir()) == []


def test_some_shards_are_not_enough(tmp_path):
    source = write_small(tmp_path / "checkpoint")
    next(source.glob("*.safetensors")).unlink()
    plan = dry_run_here(source, tmp_path / "out")
    assert (plan["names_only"], plan["shards_absent"]) == (False, 1)
    assert [problem for problem in plan["problems"] if "missing; download it" in problem]


def test_a_folder_of_another_build_is_a_problem(tmp_path, k3):
    """Unfinished or finished: the dry run says what the run would say."""
    convert_here(k3.source, tmp_path / "unfinished", workers=1, layers=frozenset({0}))
    for output in (tmp_path / "unfinished", k3.output):
        same = dry_run_here(k3.source, output, quality=Quality.FAST)
        assert same["problems"] == []
        (problem,) = dry_run_here(k3.source, output, quality=Quality.FAST, seed=7)["problems"]
        assert f"{output}: begun with other options, library versions or another source" in problem
        assert "options.seed: there 0, now 7" in problem


@pytest.mark.parametrize(
    ("cores", "asked", "layers", "workers", "threads"),
    [
        (1, None, None, 1, 1),
        (2, None, None, 2, 1),
        (8, None, None, 2, 4),  # two layers take long; the cores left over become threads
        (8, 3, None, 3, 2),
        (8, 100, None, 5, 1),  # no more workers than jobs
        (2, 4, None, 4, 1),
        (8, None, {0}, 1, 8),
    ],
)
def test_workers_and_threads_follow_the_cores(tmp_path, monkeypatch, k3, cores, asked, layers, workers, threads):
    monkeypatch.setattr("convert.prepare.available_cores", lambda: cores)
    chosen = None if layers is None else frozenset(layers)
    plan = dry_run_here(k3.source, tmp_path / "out", workers=asked, layers=chosen)
    assert (plan["workers"], plan["threads_per_worker"]) == (workers, threads)


def test_by_default_memory_limits_the_workers(tmp_path, monkeypatch, k3):
    monkeypatch.setattr("convert.prepare.available_cores", lambda: 2)
    one = dry_run_here(k3.source, tmp_path / "out")["peak_memory_bytes"] // 2
    for memory, workers in ((2 * one, 2), (2 * one - 1, 1), (one // 2, 1)):
        monkeypatch.setattr("convert.prepare.available_memory", lambda memory=memory: memory)
        assert dry_run_here(k3.source, tmp_path / "out")["workers"] == workers


def test_the_measuring_process_is_honest():
    """RUSAGE_CHILDREN of the helper counts its one child."""
    ballast = "x = bytearray(300_000_000); import json; print(json.dumps(len(x)))"
    code = MEASURED.replace('"-m", "convert", *sys.argv[1:], "--dry-run", "--json"', f'"-c", {ballast!r}')
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)[2] > 300_000_000
