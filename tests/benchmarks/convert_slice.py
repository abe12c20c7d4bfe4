"""Conversion of real-shape K3 layers, end to end: experts of 3072 × 3584 in MXFP4, made on the fly.

Every setting of the converter, then two workers on two cores against one worker on one core. Machines differ and are
shared, so the speed is also given as a ratio to a yardstick measured around each run: the three bare faiss searches of
greedy encoding (k = 1, fused kernel) on one thread, times the cores, with no reading, training or writing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from container.machine import available_cores
from tests.checkpoints import real_shape_slice

# Name, options, runs, and what the setting should reach at least on two cores: relative error in %, M weights/s.
SETTINGS: tuple[tuple[str, Sequence[str], int, float, float], ...] = (
    ("fast vq3r", ("--quality", "fast"), 3, 18.9, 60),
    ("balanced vq3r", (), 2, 16.4, 6),
    ("best vq3r", ("--quality", "best"), 1, 15.9, 2),
    ("balanced vq4p", ("--format", "vq4p"), 2, 16.8, 12),
    ("balanced vq2r", ("--format", "vq2r"), 2, 31.0, 8),
)
N_EXPERTS = 16
# For the comparison of one and two workers: a layer for each.
SCALING_LAYERS, SCALING_EXPERTS = 2, 4
N_STAGES = 3
FLOOR_VECTORS = 3072 * 3584 // 8
MIB, MILLION = 1 << 20, 1e6


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="moedock-bench-") as name:
        folder = Path(name)
        tiny = made(folder / "tiny", n_experts=1, rows=64, cols=64)
        for quality in ("fast", "best"):
            convert(tiny, folder, "--quality", quality)  # compiles the kernels
        source = made(folder / "slice", n_experts=N_EXPERTS)
        columns = (("error", 8), ("at most", 8), ("M weights/s", 12), ("at least", 9), ("× faiss", 8), ("peak", 9))
        print(f"\n{'':14}" + "".join(f" {name:>{width}}" for name, width in columns) + "   shares", flush=True)
        for label, options, n_runs, most_error, least_speed in SETTINGS:
            for _ in range(n_runs):
                before = faiss_searches()
                summary = convert(source, folder, *options)
                yardstick = (before + faiss_searches()) / 2 * available_cores()
                show(label, summary, yardstick, most_error, least_speed)
        compare_workers(folder)
    return 0


def made(folder: Path, **shape: int) -> Path:
    start = time.perf_counter()
    real_shape_slice(folder, **shape)
    print(f"slice of {shape} made in {time.perf_counter() - start:.0f} s (not counted below)", flush=True)
    return folder


def faiss_searches() -> float:
    """Weights per second that one thread searches through all stages, doing nothing else."""
    faiss.omp_set_num_threads(1)
    random = np.random.default_rng(0)
    vectors = random.standard_normal((FLOOR_VECTORS, 8), dtype=np.float32)
    index = faiss.IndexFlatL2(8)
    index.add(random.standard_normal((256, 8), dtype=np.float32))
    start = time.perf_counter()
    for _ in range(N_STAGES):
        index.search(vectors, 1)
    return vectors.size / (time.perf_counter() - start)


def convert(source: Path, folder: Path, *options: str, cores: set[int] | None = None) -> dict[str, Any]:
    """One conversion in a process of its own, on `cores` or all."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        done = subprocess.run(
            [sys.executable, "-m", "convert", str(source), str(Path(output) / "container"), "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
        )
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def show(label: str, summary: dict[str, Any], yardstick: float, most_error: float, least_speed: float) -> None:
    speed = summary["weights_per_second"]
    total = sum(summary["step_seconds"].values())
    shares = ", ".join(f"{step} {100 * s / total:.0f} %" for step, s in summary["step_seconds"].items())
    print(
        f"{label:14} {100 * summary['relative_error']:6.2f} % {most_error:6.1f} % {speed / MILLION:12.1f} "
        f"{least_speed:9.0f} {speed / yardstick:8.2f} {summary['peak_worker_bytes'] / MIB:5.0f} MiB   {shares}",
        flush=True,
    )


def compare_workers(folder: Path) -> None:
    """Two workers on two cores against one worker on one core, in turns."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        print("\none and two workers: not compared, since there are not two cores to choose from")
        return
    source = made(folder / "layers", n_experts=SCALING_EXPERTS, layers=SCALING_LAYERS)
    for quality, n_runs in (("fast", 2), ("balanced", 1)):
        ratios = []
        for _ in range(n_runs):
            one = convert(source, folder, "--quality", quality, "--workers", "1", cores=set(cores[:1]))
            two = convert(source, folder, "--quality", quality, "--workers", "2", cores=set(cores[:2]))
            ratios.append(two["weights_per_second"] / one["weights_per_second"])
        print(f"{quality}: two workers on two cores make {', '.join(f'{r:.2f}' for r in ratios)} × one on one core")


if __name__ == "__main__":
    sys.exit(main())
