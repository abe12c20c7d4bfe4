"""A container several times larger than the memory it may take: what it takes, reads and says.

Writes a container of Kimi-Linear's widths and runs the same tokens in processes of their own: under the budget, with
lookahead and without, and with all the memory that is safe. The logits must be the same bits, the peak must stay
below the budget, and what is read must be what `plan` reckons with: every token wants the whole working set, and each
expert that is not cached is one read. Run as `python -m tests.benchmarks.over_budget`; some minutes, mostly writing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from container.byte_size import parse_bytes
from container.machine import free_disk, peak_memory
from runtime.engine import Engine
from runtime.options import RunOptions
from tests.big_containers import container_of_size

N_PROMPT, N_TOKENS = 24, 24
ROOM = 1.25  # times the size asked for: whole layers, trunk, and some to spare


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.over_budget", description=__doc__)
    parser.add_argument("--size", default="8GB", help="of the container (default: 8GB)")
    parser.add_argument("--budget", default="2GB", help="of the small run (default: 2GB)")
    parser.add_argument("--container", type=Path, help="run this one instead of writing one")
    parser.add_argument("--measure", nargs=2, metavar=("BUDGET", "LOOKAHEAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        budget, lookahead = (int(text) for text in arguments.measure)
        print(json.dumps(measured(arguments.container, budget or None, lookahead)))
        return 0
    if arguments.container:
        return compare(arguments.container, parse_bytes(arguments.budget, "--budget"))
    with tempfile.TemporaryDirectory(prefix="moedock-bench-") as name:
        n_bytes, room = parse_bytes(arguments.size, "--size"), free_disk(Path(name))
        if room < ROOM * n_bytes:
            print(f"\na container larger than the budget: not run, {name} has {room / 1e9:.1f} GB of room")
            return 0
        start = time.perf_counter()
        container_of_size(Path(name), n_bytes)
        print(f"\nwritten in {time.perf_counter() - start:.0f} s", flush=True)
        return compare(Path(name), parse_bytes(arguments.budget, "--budget"))


def measured(folder: Path, budget_bytes: int | None, lookahead: int) -> dict[str, Any]:
    """A prompt in one chunk, then tokens one by one; figures of the latter but for the peak."""
    with Engine.open(folder, RunOptions(budget_bytes=budget_bytes, lookahead=lookahead)) as engine:
        ids = np.random.default_rng(0).integers(0, engine.vocab_size, N_PROMPT + N_TOKENS).tolist()
        state = engine.new_state()
        said = hashlib.sha256(engine.feed(state, ids[:N_PROMPT]).tobytes())
        before, start = engine.store.statistics, time.perf_counter()
        for token_id in ids[N_PROMPT:]:
            logits = engine.step(state, token_id)
            said.update(logits.tobytes())
        seconds = time.perf_counter() - start
        used = engine.store.statistics - before
        return {
            "budget_bytes": engine.budget_bytes,
            "peak_bytes": peak_memory(),
            "tokens_per_second": N_TOKENS / seconds,
            "finite": bool(np.isfinite(logits).all()),
            "logits_sha256": said.hexdigest(),
            "hits": used.n_hits,
            "misses": used.n_misses,
            "reads": used.n_reads,
            "ahead_reads": used.ahead_reads,
            "read_bytes": used.read_bytes,
            "stride_bytes": engine.plan.stride_bytes,
            "working_set_bytes": engine.plan.working_set_bytes,
            "n_slots": engine.plan.n_slots(engine.budget_bytes),
            "n_experts": engine.plan.n_experts,
        }


def compare(folder: Path, budget_bytes: int) -> int:
    """Run thrice and hold the results against each other. 0 when everything is as it should be."""
    on_disk = sum(path.stat().st_size for path in folder.iterdir())
    print(f"container of {on_disk / 1e9:.2f} GB, budget {budget_bytes / 1e9:.2f} GB, {N_TOKENS} tokens", flush=True)
    runs = {
        "under the budget": run(folder, budget_bytes, RunOptions.lookahead),
        "without lookahead": run(folder, budget_bytes, 0),
        "all memory that is safe": run(folder, 0, RunOptions.lookahead),
    }
    problems = []
    for name, found in runs.items():
        problems += [f"{name}: {problem}" for problem in problems_of(found)]
        print(
            f"{name:24} cache {found['n_slots']:5} of {found['n_experts']}, peak {found['peak_bytes'] / 1e9:.2f} of "
            f"{found['budget_bytes'] / 1e9:.2f} GB, {found['tokens_per_second']:.2f} tokens/s, {found['hits']} hits, "
            f"{found['misses']} misses, {found['read_bytes'] / N_TOKENS / 1e6:.1f} MB a token (working set "
            f"{found['working_set_bytes'] / 1e6:.1f})",
            flush=True,
        )
    if len({found["logits_sha256"] for found in runs.values()}) != 1:
        problems.append("the logits differ")
    print("\n".join(problems) or "the same bits; every peak in its budget; read what was reckoned")
    return 1 if problems else 0


def run(folder: Path, budget_bytes: int, lookahead: int) -> dict[str, Any]:
    """`measured` in a process of its own; 0: the default budget."""
    command = [sys.executable, "-m", "tests.benchmarks.over_budget", "--container", str(folder)]
    done = subprocess.run(
        [*command, "--measure", str(budget_bytes), str(lookahead)], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def problems_of(found: dict[str, Any]) -> list[str]:
    """What contradicts the plan."""
    stride_bytes = found["stride_bytes"]
    wanted = N_TOKENS * found["working_set_bytes"]
    problems = {
        "the peak is above the budget": found["peak_bytes"] > found["budget_bytes"],
        "logits are not finite": not found["finite"],
        "hits and misses are not the working set of every token": (found["hits"] + found["misses"]) * stride_bytes
        != wanted,
        "a read is not one record": found["read_bytes"] != found["reads"] * stride_bytes,
        "reads are not misses": found["ahead_reads"] == 0 and found["reads"] != found["misses"],
    }
    return [problem for problem, holds in problems.items() if holds]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
