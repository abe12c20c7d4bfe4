"""Does fetching overlap converting? `hf://` from a slow hub against downloading alone and converting alone.

The loopback hub's rate is set so that the download alone takes about as long as the conversion alone: then work one
after the other takes twice as long as work that overlaps. Staging holds four of the ten shards. Run as
`python -m tests.benchmarks.overlap`; a few minutes on two cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.convert_slice import made
from tests.convert.staged import shard_sizes
from tests.hub import HubServer

REPOSITORY_ID = "org/slice"
N_LAYERS, N_EXPERTS = 8, 3
CONNECTIONS = 2  # of the download alone, and of a conversion that stages
N_STAGED = 4  # shards: two workers hold one each, two more come meanwhile
# Enough work for a run to take half a minute where two cores convert 60 M weights a second.
QUALITY = "fast"
MILLION = 1e6


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="moedock-bench-") as name, HubServer() as hub:
        folder = Path(name)
        run(hub, "convert", str(made(folder / "tiny", n_experts=1, rows=64, cols=64)), str(folder / "warm"))
        source = made(folder / "slice", n_experts=N_EXPERTS, layers=N_LAYERS)
        sizes = shard_sizes(source)
        total = sum(sizes.values())
        hub.add(REPOSITORY_ID, source)
        alone = run(hub, "convert", str(source), str(folder / "local"))
        show("convert alone", alone, total)
        hub.set_rate(int(total / alone / CONNECTIONS))
        download = run(hub, "download", REPOSITORY_ID, str(folder / "copy"), "--jobs", str(CONNECTIONS))
        show("download alone", download, total)
        bound = sum(sorted(sizes.values())[-N_STAGED:])
        staging = ["--staging", str(folder / "staging"), "--staging-size", str(bound)]
        together = run(hub, "convert", f"hf://{REPOSITORY_ID}", str(folder / "streamed"), *staging)
        show(f"hf://, staging of {bound / MILLION:.0f} MB", together, total)
        ratio = together / (alone + download)
        print(f"together / one after the other: {ratio:.2f} (0.5: all overlaps, 1: nothing does)", flush=True)
        same = (folder / "local" / "manifest.json").read_bytes() == (folder / "streamed" / "manifest.json").read_bytes()
        print(f"the same manifest: {'yes' if same else 'NO'}")
    return 0 if same else 1


def run(hub: HubServer, command: str, *arguments: str) -> float:
    """Seconds that a command takes."""
    quality = ["--quality", QUALITY] if command == "convert" else []
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", command, *arguments, *quality],
        env=os.environ | {"HF_ENDPOINT": hub.endpoint},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - start


def show(label: str, seconds: float, n_bytes: int) -> None:
    print(
        f"{label:32} {seconds:6.1f} s   {n_bytes / MILLION:6.0f} MB, {n_bytes / seconds / MILLION:6.1f} MB/s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
