"""What source and container take on disk together, over time, in the three ways to convert a whole model.

The source is kept; deleted as the container grows (`--reclaim on`); or streamed from a hub on loopback through a
staging folder with room for its two largest shards. Run as `python -m tests.benchmarks.disk_over_time`; one or two
minutes on two cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.checkpoints import real_shape_slice
from tests.hub import HubServer

# Eight MoE layers of 24 MB in MXFP4, each in a shard of its own; one shard more for all else.
N_LAYERS, N_EXPERTS, ROWS, COLS = 8, 16, 1024, 960
SAMPLE_SECONDS = 0.01
N_ROWS = 10
MB = 1e6


@dataclass(frozen=True)
class Sample:
    """Bytes on disk at one moment."""

    seconds: float
    source: int  # or staging folder
    output: int

    @property
    def total(self) -> int:
        return self.source + self.output


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="moedock-bench-") as name:
        folder = Path(name)
        source = real_shape_slice(folder / "source", n_experts=N_EXPERTS, rows=ROWS, cols=COLS, layers=N_LAYERS)
        ways = {
            "source kept": kept(source, folder),
            "--reclaim on": reclaimed(source, folder),
            "hf://, staging": streamed(source, folder),
        }
        whole, container = disk_bytes(source), disk_bytes(folder / "kept")
        n_shards = len(list(source.glob("*.safetensors")))
        print(f"source {whole / MB:.0f} MB in {n_shards} shards, container {container / MB:.0f} MB\n")
        for label, samples in ways.items():
            show_peak(label, samples, whole + container)
        show(ways)
    return 0


def show_peak(label: str, samples: Sequence[Sample], both: int) -> None:
    """`both`: source and container, the measure of all peaks."""
    peak, last = max(sample.total for sample in samples), samples[-1]
    print(
        f"{label:16} peak {peak / MB:4.0f} MB = {100 * peak / both:5.1f} % of source + container, in the end "
        f"{last.total / MB:4.0f} MB; {last.seconds:5.1f} s, {len(samples)} samples"
    )


def show(ways: Mapping[str, Sequence[Sample]]) -> None:
    """A table over each way's own time: source + output, in MB, at the end of each tenth."""
    print("\n| time | " + " | ".join(ways) + " |\n|---|" + "---:|" * len(ways))
    for row in range(1, N_ROWS + 1):
        cells = []
        for samples in ways.values():
            end = samples[-1].seconds * row / N_ROWS
            at = next(sample for sample in samples if sample.seconds >= end)
            cells.append(f"{at.source / MB:.0f} + {at.output / MB:.0f} = {at.total / MB:.0f}")
        print(f"| {100 * row // N_ROWS} % | " + " | ".join(cells) + " |")


def kept(source: Path, folder: Path) -> list[Sample]:
    return sampled(source, folder / "kept", str(source), str(folder / "kept"))


def reclaimed(source: Path, folder: Path) -> list[Sample]:
    going = Path(shutil.copytree(source, folder / "going"))
    return sampled(going, folder / "reclaimed", str(going), str(folder / "reclaimed"), "--reclaim", "on")


def streamed(source: Path, folder: Path) -> list[Sample]:
    staging = folder / "staging"
    room = sum(sorted(path.stat().st_size for path in source.glob("*.safetensors"))[-2:])
    options = ["--staging", str(staging), "--staging-size", f"{room}B"]
    with HubServer() as hub:
        hub.add("org/name", source)
        address = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
        return sampled(staging, folder / "streamed", "hf://org/name", str(folder / "streamed"), *options, **address)


def sampled(source: Path, output: Path, *arguments: str, **environment: str) -> list[Sample]:
    """Convert in a process of its own, and look at both folders all the while."""
    command = [sys.executable, "-m", "convert", *arguments, "--quality", "fast"]
    start = time.monotonic()
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        samples = []
        while process.poll() is None:
            samples.append(Sample(time.monotonic() - start, disk_bytes(source), disk_bytes(output)))
            time.sleep(SAMPLE_SECONDS)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said
    return [*samples, Sample(time.monotonic() - start, disk_bytes(source), disk_bytes(output))]


def disk_bytes(folder: Path) -> int:
    """Sizes of all files below a folder, whatever comes and goes meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118 - thousands of times
            except FileNotFoundError:
                continue  # it went just now
    return total


if __name__ == "__main__":
    sys.exit(main())
