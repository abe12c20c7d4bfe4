"""What this machine really offers: cores, memory and disk, control-group limits included."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def available_cores() -> int:
    """Cores this process may use: affinity, then every cgroup quota above it, rounded down, at least 1."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1))
    for folder in cgroup_folders(CGROUP, OWN_CGROUP):
        cores = min(cores, _cgroup_cores(folder) or cores)
    return max(1, int(cores))


def available_memory() -> int | None:
    """Bytes that can still be used: the kernel's estimate, lowered by cgroup limits. None where unknown."""
    candidates = [_kernel_bytes(Path("/proc/meminfo"), "MemAvailable")]
    candidates += [_cgroup_memory(folder) for folder in cgroup_folders(CGROUP, OWN_CGROUP)]
    known = [value for value in candidates if value is not None]
    return min(known) if known else None


def free_disk(folder: Path) -> int:
    """Free bytes on the file system that holds `folder`, or would hold it once created."""
    return shutil.disk_usage(_existing(folder)).free


def same_disk(one: Path, other: Path) -> bool:
    """True when two folders, existing or to be made, lie on one file system."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def forget_cached(path: Path) -> None:
    """Ask the kernel to drop a synced file from its page cache, so that the next read is one of the disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_memory() -> int:
    """This process's peak resident memory in bytes."""
    peak = _kernel_bytes(Path("/proc/self/status"), "VmHWM")
    if peak is not None:  # on Linux ru_maxrss of a spawned process begins at its parent's peak
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cgroup_folders(root: Path, own: Path) -> list[Path]:
    """This process's control groups under `root`, v2 or v1, from its own up to the root."""
    folders = []
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / controllers
        group = base / path.lstrip("/")
        folders += [group, *(parent for parent in group.parents if parent == base or base in parent.parents)]
    return folders or [root]


def _existing(folder: Path) -> Path:
    """The folder itself, or the one that it would be made in."""
    folder = folder.resolve()
    while not folder.exists():
        folder = folder.parent
    return folder


def _cgroup_cores(folder: Path) -> float | None:
    quota = _words(folder / "cpu.max")
    if len(quota) == 2:
        return None if quota[0] == "max" else int(quota[0]) / int(quota[1])
    v1_quota, v1_period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    if v1_quota and v1_period and int(v1_quota[0]) > 0:
        return int(v1_quota[0]) / int(v1_period[0])
    return None


def _cgroup_memory(folder: Path) -> int | None:
    """Limit minus what is used, page cache not counted as used: the kernel gives it back."""
    for limit_name, used_name, cache_key in (
        ("memory.max", "memory.current", "file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        limit, used = _words(folder / limit_name), _words(folder / used_name)
        if limit and used and limit[0] != "max":
            stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
            return max(0, int(limit[0]) - int(used[0]) + int(stat.get(cache_key, 0)))
    return None


def _kernel_bytes(path: Path, key: str) -> int | None:
    """The value of a line `key: N kB`."""
    for line in _lines(path):
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []  # no such control group or kernel interface: nothing limits us there
