"""A file from the loopback hub: `fetch_file`, which hashes, resumes and syncs, against a plain `curl -o`.

Both write to the same folder, in turns, each in a process of its own; the hub is a third. Machines differ and are
shared, so what counts is the ratio of each pair of neighbours. Peak memory is shown for two sizes of file: it must not
follow the size. Where both cores are busy, the ratio nears that of the work: curl's, which ours costs too, against that
and sha256.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from download.fetch import fetch_file
from download.folder import SourceFolder
from download.listing import RemoteFile
from download.transfer import Transfer

REPOSITORY = "org/name"
SIZES_BYTES = (256 << 20, 1 << 30)
N_ROUNDS = 5
LEAST_RATIO = 0.7
MIB, BILLION = 1 << 20, 1e9


def main() -> int:
    curl = shutil.which("curl")
    if curl is None:
        print("curl is not installed: nothing to compare with")
        return 1
    for n_bytes in SIZES_BYTES:
        with tempfile.TemporaryDirectory(prefix="moedock-bench-") as name:
            folder = Path(name)
            sha256 = made(folder / "served" / "model.safetensors", n_bytes)
            with served(folder / "served") as url:
                compare(curl, url, n_bytes, sha256, folder)
    return 0


def made(path: Path, n_bytes: int) -> str:
    """Write a file of random bytes; returns its sha256."""
    path.parent.mkdir()
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(n_bytes // MIB):
            block = os.urandom(MIB)
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of the folder's file at a hub in a process of its own."""
    hub = subprocess.Popen(
        [sys.executable, "-m", "tests.hub", str(folder), "--repo", REPOSITORY], stdout=subprocess.PIPE, text=True
    )
    try:
        assert hub.stdout is not None
        endpoint = hub.stdout.readline().strip()
        yield f"{endpoint}/{REPOSITORY}/resolve/main/model.safetensors"
    finally:
        hub.terminate()
        hub.wait()


def compare(curl: str, url: str, n_bytes: int, sha256: str, folder: Path) -> None:
    by_curl(curl, url, folder)  # the hub hashes the file when it is first asked for
    print(f"\n{n_bytes / MIB:5.0f} MiB   {'curl':>9}  {'fetch_file':>10} {'ratio':>6}   {'synced: curl':>12}", end="")
    print(f"  {'fetch_file':>10} {'ratio':>6}   peak memory", flush=True)
    ratios, synced_ratios = [], []
    for _ in range(N_ROUNDS):
        plain = by_curl(curl, url, folder)
        found = by_fetch(url, n_bytes, sha256, folder)
        ratios.append(plain.received_seconds / found.received_seconds)
        synced_ratios.append(plain.synced_seconds / found.synced_seconds)
        print(
            f"            {n_bytes / plain.received_seconds / BILLION:4.2f} GB/s   "
            f"{n_bytes / found.received_seconds / BILLION:4.2f} GB/s {ratios[-1]:6.2f}      "
            f"{n_bytes / plain.synced_seconds / BILLION:4.2f} GB/s   "
            f"{n_bytes / found.synced_seconds / BILLION:4.2f} GB/s {synced_ratios[-1]:6.2f}   "
            f"{found.peak_bytes / MIB:7.0f} MiB",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f} (at least {LEAST_RATIO}), ", end="")
    print(f"synced {statistics.median(synced_ratios):.2f}", flush=True)


@dataclass(frozen=True)
class Timing:
    """How long a file took to be here (hashed, where it is), and to be safe on the disk; a process's peak memory."""

    received_seconds: float
    synced_seconds: float
    peak_bytes: int = 0


def by_curl(curl: str, url: str, folder: Path) -> Timing:
    """curl, and then a sync of its file."""
    target = folder / "by-curl"
    start = time.perf_counter()
    subprocess.run([curl, "--silent", "--fail", "--location", "--output", str(target), url], check=True)
    received = time.perf_counter() - start
    with target.open("r+b") as file:
        os.fsync(file.fileno())
    synced = time.perf_counter() - start
    target.unlink()
    return Timing(received, synced)


def by_fetch(url: str, n_bytes: int, sha256: str, folder: Path) -> Timing:
    """A process that fetches the file."""
    target = folder / "by-fetch"
    command = [sys.executable, "-m", "tests.benchmarks.download_speed", url, str(n_bytes), sha256, str(target)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    shutil.rmtree(target)
    return Timing(**json.loads(done.stdout))


def fetch(url: str, n_bytes: str, sha256: str, target: str) -> None:
    """What that process does."""
    syncing_seconds = 0.0
    sync = os.fsync

    def timed_sync(descriptor: int) -> None:
        nonlocal syncing_seconds
        begin = time.perf_counter()
        sync(descriptor)
        syncing_seconds += time.perf_counter() - begin

    os.fsync = timed_sync
    file = RemoteFile(name="model.safetensors", n_bytes=int(n_bytes), sha256=sha256)
    transfer = Transfer(headers=dict)
    start = time.perf_counter()
    fetch_file(transfer, url, file, SourceFolder(Path(target)), progress=lambda _: None)
    seconds = time.perf_counter() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(asdict(Timing(seconds - syncing_seconds, seconds, peak_bytes))))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        fetch(*sys.argv[1:])
    else:
        sys.exit(main())
