"""Cores and memory under control groups, on made-up trees of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from container import machine
from container.machine import available_cores, available_memory, cgroup_folders, free_disk, memory_figures, peak_memory

MIB = 1 << 20


class Tree:
    """A fake /sys/fs/cgroup and /proc/self/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.root, self.own = folder / "cgroup", folder / "own"
        self.root.mkdir()

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Tree:
    tree = Tree(tmp_path)
    monkeypatch.setattr(machine, "CGROUP", tree.root)
    monkeypatch.setattr(machine, "OWN_CGROUP", tree.own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "_kernel_bytes", lambda path, key: 4096 * MIB)
    return tree


def test_without_limits(tree):
    tree.own.write_text("0::/\n")
    tree.write("cpu.max", "max 100000\n")
    tree.write("memory.max", "max\n")
    tree.write("memory.current", "1000\n")
    assert (available_cores(), available_memory()) == (8, 4096 * MIB)


def test_without_control_groups(tree):
    assert (available_cores(), available_memory()) == (8, 4096 * MIB)


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000 100000", 1), ("200000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)]
)
def test_v2_quota(tree, quota, cores):
    tree.own.write_text("0::/\n")
    tree.write("cpu.max", quota + "\n")
    assert available_cores() == cores


def test_v2_limits_of_every_group_above_count(tree):
    tree.own.write_text("0::/user.slice/job\n")
    tree.write("user.slice/job/cpu.max", "400000 100000\n")
    tree.write("user.slice/cpu.max", "300000 100000\n")
    tree.write("cpu.max", "max 100000\n")
    tree.write("user.slice/memory.max", f"{1024 * MIB}\n")
    tree.write("user.slice/memory.current", f"{600 * MIB}\n")
    tree.write("user.slice/memory.stat", f"anon {500 * MIB}\nfile {100 * MIB}\nfile_mapped 3\n")
    tree.write("user.slice/job/memory.max", "max\n")
    tree.write("user.slice/job/memory.current", f"{600 * MIB}\n")
    assert available_cores() == 3
    assert available_memory() == (1024 - 600 + 100) * MIB  # page cache comes back


def test_v2_group_seen_from_inside_a_container(tree):
    """The path of the host is not there; the container's own limits stand at the root."""
    tree.own.write_text("0::/docker/4711\n")
    tree.write("cpu.max", "100000 100000\n")
    tree.write("memory.max", f"{256 * MIB}\n")
    tree.write("memory.current", "0\n")
    assert (available_cores(), available_memory()) == (1, 256 * MIB)


def test_v1_limits(tree):
    tree.own.write_text("12:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/init.scope\n")
    tree.write("cpu,cpuacct/job/cpu.cfs_quota_us", "250000\n")
    tree.write("cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    tree.write("cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    tree.write("cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    tree.write("memory/job/memory.limit_in_bytes", f"{512 * MIB}\n")
    tree.write("memory/job/memory.usage_in_bytes", f"{200 * MIB}\n")
    tree.write("memory/job/memory.stat", f"cache 1\ntotal_cache {50 * MIB}\n")
    tree.write("memory/memory.limit_in_bytes", "9223372036854771712\n")
    tree.write("memory/memory.usage_in_bytes", "0\n")
    assert available_cores() == 2
    assert available_memory() == (512 - 200 + 50) * MIB


def test_a_group_over_its_limit_has_nothing_left(tree):
    tree.own.write_text("0::/\n")
    tree.write("memory.max", "1000\n")
    tree.write("memory.current", "2000\n")
    assert available_memory() == 0


def test_the_least_limit_of_all_groups_counts(tree, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2 << 20, "SC_PAGE_SIZE": 4096}.get)
    tree.own.write_text("12:memory:/a/b\n0::/c/d\n")
    tree.write("memory/a/b/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_figures().limit_bytes is None  # version 1's way to say so
    assert memory_figures().usable_bytes == memory_figures().physical_bytes == 8192 * MIB
    tree.write("memory/a/memory.limit_in_bytes", f"{900 * MIB}\n")
    assert memory_figures().limit_bytes == 900 * MIB
    tree.write("c/memory.max", f"{700 * MIB}\n")
    tree.write("c/d/memory.max", "max\n")
    assert memory_figures().usable_bytes == memory_figures().limit_bytes == 700 * MIB
    tree.write("c/memory.max", f"{9000 * MIB}\n")
    tree.write("memory/a/memory.limit_in_bytes", f"{9000 * MIB}\n")
    assert memory_figures().usable_bytes == 8192 * MIB  # a limit above what the machine has


def test_swap_in_use_and_unknown_figures(tree, monkeypatch):
    kernel = {"SwapTotal": 5 * MIB, "SwapFree": 2 * MIB, "MemAvailable": 100 * MIB}
    monkeypatch.setattr(machine, "_kernel_bytes", lambda path, key: kernel[key])
    figures = memory_figures()
    assert (figures.swap_used_bytes, figures.available_bytes, figures.limit_bytes) == (3 * MIB, 100 * MIB, None)

    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    monkeypatch.setattr(machine, "_kernel_bytes", lambda path, key: None)
    nothing = memory_figures()
    assert (nothing.usable_bytes, nothing.available_bytes, nothing.swap_used_bytes) == (None, None, 0)


def test_affinity_counts(tree, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert available_cores() == 1


def test_groups_from_the_own_one_up(tree):
    tree.own.write_text("4:cpu,cpuacct:/a\n0::/b/c\n")
    root = tree.root
    v1 = root / "cpu,cpuacct"
    assert cgroup_folders(root, tree.own) == [v1 / "a", v1, root / "b" / "c", root / "b", root]


def test_unknown_memory_is_unknown(tree, monkeypatch):
    monkeypatch.setattr(machine, "_kernel_bytes", lambda path, key: None)
    assert available_memory() is None


def test_this_machine_can_be_read():
    assert available_cores() >= 1
    memory = available_memory()
    assert memory is None or memory > 1 << 20
    assert 1 << 20 < peak_memory() < 1 << 40
    figures = memory_figures()
    assert figures.usable_bytes is None or figures.usable_bytes > 1 << 28


def test_free_disk_of_a_folder_to_come(tmp_path):
    assert abs(free_disk(tmp_path / "a" / "b") - free_disk(tmp_path)) < 1 << 30
