"""Conversion of one real-shape K3 layer slice, end to end: 16 experts of 3072 × 3584 in MXFP4, made on the fly.

Machines differ and are shared, so the speed is also given as a ratio to a yardstick measured around each run: the
three bare faiss searches (k = 1, fused kernel) on one thread, times the cores, with no reading, training or writing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from container.machine import available_cores
from tests.checkpoints import real_shape_slice

N_EXPERTS = 16
RUNS = 3
N_STAGES = 3
FLOOR_VECTORS = 3072 * 3584 // 8
MIB, MILLION = 1 << 20, 1e6


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="moedock-bench-") as name:
        folder = Path(name)
        start = time.perf_counter()
        real_shape_slice(folder / "slice", n_experts=N_EXPERTS)
        print(f"slice of {N_EXPERTS} experts made in {time.perf_counter() - start:.0f} s (not counted below)\n")
        convert_once(folder)  # compiles the kernels, warms the page cache
        print(f"{'':6} {'M weights/s':>11} {'× faiss':>8} {'error':>8} {'peak':>9}   share of time per step")
        for number in range(RUNS):
            before = faiss_searches()
            summary = convert_once(folder)
            yardstick = (before + faiss_searches()) / 2 * available_cores()
            show(f"run {number + 1}", summary, yardstick)
    return 0


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


def convert_once(folder: Path) -> dict[str, Any]:
    """One conversion in a process of its own, default options."""
    output = Path(tempfile.mkdtemp(dir=folder))
    done = subprocess.run(
        [sys.executable, "-m", "convert", str(folder / "slice"), str(output / "container"), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def show(label: str, summary: dict[str, Any], yardstick: float) -> None:
    speed = summary["weights_per_second"]
    total = sum(summary["step_seconds"].values())
    shares = ", ".join(f"{step} {100 * s / total:.0f} %" for step, s in summary["step_seconds"].items())
    print(
        f"{label:6} {speed / MILLION:11.1f} {speed / yardstick:8.2f} {100 * summary['relative_error']:6.2f} % "
        f"{summary['peak_worker_bytes'] / MIB:5.0f} MiB   {shares}"
    )
