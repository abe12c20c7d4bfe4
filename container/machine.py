"""What this machine really offers: cores, memory and disk, control-group limits included."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMORY = Path("/proc/meminfo")
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """What is known about this machine's memory, in bytes; None where the system does not say."""

    physical_bytes: int | None
    limit_bytes: int | None  # the least limit of the control groups above this process
    available_bytes: int | None  # what can still be used: the kernel's estimate, lowered by what the groups leave
    swap_used_bytes: int

    @property
    def usable_bytes(self) -> int | None:
        """What this process could ever have: the machine's memory or the limit, whichever is less."""
        known = [value for value in (self.physical_bytes, self.limit_bytes) if value is not None]
        return min(known) if known else None


def memory_figures() -> MemoryFigures:
    """Memory of this machine and what control groups, version 1 or 2 and at any level, leave of it."""
    limits = [_cgroup_limit(folder) for folder in cgroup_folders(CGROUP, OWN_CGROUP)]
    swap = [_kernel_bytes(MEMORY, key) for key in ("SwapTotal", "SwapFree")]
    return MemoryFigures(
        physical_bytes=_physical_memory(),
        limit_bytes=min((limit for limit in limits if limit is not None), default=None),
        available_bytes=available_memory(),
        swap_used_bytes=(swap[0] or 0) - (swap[1] or 0),
    )


def available_cores() -> int:
    """Cores this process may use: affinity, then every cgroup quota above it, rounded down, at least 1."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1))
    for folder in cgroup_folders(CGROUP, OWN_CGROUP):
        cores = min(cores, _cgroup_cores(folder) or cores)
    return max(1, int(cores))


def available_memory() -> int | None:
    """Bytes that can still be used: the kernel's estimate, lowered by cgroup limits. None where unknown."""
    candidates = [_kernel_bytes(MEMORY, "MemAvailable")]
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
    limit = _cgroup_limit(folder)
    for used_name, cache_key in (("memory.current", "file"), ("memory.usage_in_bytes", "total_cache")):
        used = _words(folder / used_name)
        if limit is not None and used:
            stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
            return max(0, limit - int(used[0]) + int(stat.get(cache_key, 0)))
    return None


def _cgroup_limit(folder: Path) -> int | None:
    """The memory limit of one group, v2 or v1; v1 spells "none" as a number near 2⁶³."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _words(folder / name)
        if limit and limit[0] != "max":
            return int(limit[0]) if int(limit[0]) < _NO_LIMIT else None
    return None


def _physical_memory() -> int | None:
    """Bytes of memory of the machine, as any Unix says it."""
    try:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return pages * page_bytes if pages > 0 and page_bytes > 0 else None


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
