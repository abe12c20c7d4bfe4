"""A slice of Kimi-Linear's widths in the runtime: everything cached, and nothing cached.

Five layers, 32 experts of 2304 × 1024 in each of four, vocabulary 20,480. With everything cached decoding and prefill
are bound by arithmetic. With the smallest cache most experts are read, and what decoding reads a second is compared
with plain reads of the very same records by as many threads, in turns, since disks and machines are shared. Run as
`python -m tests.benchmarks.run_slice [--json]`; about a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from runtime.disk.disk_speed import compare_cold_reads, plain_read
from runtime.engine import Engine
from runtime.models import StepTrace
from runtime.options import RunOptions
from runtime.state import SequenceState
from tests.big_containers import kimi_linear_slice

# Tokens per second of the C ancestor's decoding of a like slice on two cores, and what is asked of ours.
ANCESTOR, LEAST_DECODE, LEAST_PREFILL, LEAST_SHARE = 9.45, 19.0, 4.0, 0.85
N_PROMPT, N_TOKENS, N_COLD_TOKENS = 512, 32, 8
N_TURNS = 5
N_FORECAST = RunOptions.lookahead
COLD = (
    "cold_tokens_per_second", "hit_rate", "bytes_per_token", "read_gb_per_second", "plain_read_gb_per_second",
    "share_of_plain",
)  # fmt: skip


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.run_slice", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args(argv).json
    with tempfile.TemporaryDirectory(prefix="moedock-bench-") as name:
        start = time.perf_counter()
        folder = kimi_linear_slice(Path(name))
        made_seconds = time.perf_counter() - start
        report = {**cached(folder), **cold(folder)}
    print(json.dumps(report, indent=1) if as_json else text(report, made_seconds), flush=True)
    return 0


def prompt(engine: Engine, n_ids: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, engine.vocab_size, n_ids).tolist()
    return ids


def decode(engine: Engine, state: SequenceState, ids: Sequence[int], trace: bool = False) -> list[StepTrace]:
    """Take `ids` one by one."""
    traces = [StepTrace() for _ in ids] if trace else []
    for n, token_id in enumerate(ids):
        engine.step(state, token_id, trace=traces[n] if trace else None)
    return traces


def per_second(n_tokens: int, work: Callable[[], object]) -> float:
    """Median over several turns."""
    seconds = []
    for _ in range(N_TURNS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return n_tokens / median(seconds)


def cached(folder: Path) -> dict[str, Any]:
    """Decoding and prefill with all experts in memory, by one thread and by as many as there are cores."""
    speeds: dict[str, Any] = {}
    for threads in (None, 1):
        with Engine.open(folder, RunOptions(context=4 * N_PROMPT, threads=threads)) as engine:
            ids = prompt(engine, N_PROMPT)
            state = engine.new_state()
            engine.feed(state, ids)  # compiles, and reads every expert
            decode(engine, state, ids[:2])
            before = engine.store.statistics
            suffix, cpu = "" if threads is None else "_one_thread", time.process_time()
            speeds[f"decode_tokens_per_second{suffix}"] = per_second(
                N_TOKENS, lambda engine=engine, state=state, ids=ids: decode(engine, state, ids[:N_TOKENS])
            )
            speeds[f"decode_cpu_seconds_per_token{suffix}"] = (time.process_time() - cpu) / (N_TURNS * N_TOKENS)
            speeds[f"prefill_tokens_per_second{suffix}"] = per_second(
                N_PROMPT, lambda engine=engine, ids=ids: engine.feed(engine.new_state(), ids)
            )
            if (engine.store.statistics - before).n_misses:
                raise AssertionError("not all experts were cached")
            if threads is None:
                speeds["threads"] = engine.plan.n_threads
    speeds["prefill_over_decode"] = speeds["prefill_tokens_per_second"] / speeds["decode_tokens_per_second"]
    return speeds


def cold(folder: Path) -> dict[str, Any]:
    """Decoding with the smallest cache; plain reads; and the store alone against plain reads."""
    with Engine.open(folder) as engine:
        floor_bytes = engine.plan.floor_bytes
    report: dict[str, Any] = {}
    for lookahead in (N_FORECAST, 0):
        suffix = "" if lookahead else "_without_lookahead"
        with Engine.open(folder, RunOptions(budget_bytes=floor_bytes, lookahead=lookahead)) as engine:
            report |= {name + suffix: value for name, value in cold_decoding(engine).items()}
            if lookahead:
                hits, trials = engine.recall.hits, engine.recall.trials
                report["lookahead_recall"] = [n_hits / trials for n_hits in hits]
                alone = compare_cold_reads(engine.reader, n_readers=RunOptions.readers, n_bytes=1 << 29)
    report["store_alone_gb_per_second"] = alone.store_gb_per_second
    report["store_alone_share_of_plain"] = alone.plain_seconds / alone.store_seconds
    return report


def cold_decoding(engine: Engine) -> dict[str, float]:
    """Turns of decoding, each followed by a plain read of all records that its tokens wanted."""
    state, ids = engine.new_state(), prompt(engine, N_COLD_TOKENS * (N_TURNS + 1), seed=1)
    decode(engine, state, ids[-N_COLD_TOKENS:])  # the first touch of memory is no reading
    before, seconds, plain, shares = engine.store.statistics, [], [], []
    for turn in range(N_TURNS):
        began, start = engine.store.statistics, time.perf_counter()
        traces = decode(engine, state, ids[turn * N_COLD_TOKENS :][:N_COLD_TOKENS], trace=True)
        seconds.append(time.perf_counter() - start)
        records = [(layer, int(e)) for each in traces for layer, chosen in each.routing.items() for e in chosen.flat]
        plain_seconds = plain_read(engine.reader, records, RunOptions.readers)
        plain.append(len(records) * engine.reader.layout.stride_bytes / plain_seconds)
        shares.append((engine.store.statistics - began).read_bytes / seconds[-1] / plain[-1])
    used = engine.store.statistics - before
    return {
        "cold_tokens_per_second": N_COLD_TOKENS / median(seconds),
        "hit_rate": used.hit_rate,
        "bytes_per_token": used.read_bytes / (N_TURNS * N_COLD_TOKENS),
        "working_set_bytes": engine.plan.working_set_bytes,
        "read_gb_per_second": used.read_bytes / sum(seconds) / 1e9,
        "plain_read_gb_per_second": median(plain) / 1e9,
        "share_of_plain": median(shares),
    }


def text(report: dict[str, Any], made_seconds: float) -> str:
    """The same for people."""
    lines = [
        f"\nKimi-Linear's widths, 5 layers of 32 experts (made in {made_seconds:.0f} s, not counted below)",
        f"all experts cached, {report['threads']} threads",
        f"  decode   {report['decode_tokens_per_second']:8.1f} tokens/s   at least {LEAST_DECODE:.0f}; the C ancestor "
        f"{ANCESTOR}; one thread {report['decode_tokens_per_second_one_thread']:.1f}",
        f"           {1000 * report['decode_cpu_seconds_per_token']:8.1f} ms of processor time a token, by one thread "
        f"{1000 * report['decode_cpu_seconds_per_token_one_thread']:.1f}",
        f"  prefill  {report['prefill_tokens_per_second']:8.1f} tokens/s   {report['prefill_over_decode']:.1f} × "
        f"decode, at least {LEAST_PREFILL:.0f}; one thread {report['prefill_tokens_per_second_one_thread']:.1f}",
        f"the smallest cache, working set {report['working_set_bytes'] / 1e6:.1f} MB a token",
    ]
    for suffix, name in (("", f"lookahead {N_FORECAST}"), ("_without_lookahead", "no lookahead")):
        found = {key: report[key + suffix] for key in COLD}
        lines.append(
            f"  {name:13}{found['cold_tokens_per_second']:6.1f} tokens/s, {found['hit_rate']:.1%} hits, "
            f"{found['bytes_per_token'] / 1e6:.1f} MB a token, {found['read_gb_per_second']:.2f} GB/s, "
            f"{found['share_of_plain']:.0%} of {found['plain_read_gb_per_second']:.2f} GB/s of plain reads"
        )
    return "\n".join(
        [
            *lines,
            f"  the store alone, nothing cached: {report['store_alone_gb_per_second']:.2f} GB/s, "
            f"{report['store_alone_share_of_plain']:.0%} of plain reads (at least {LEAST_SHARE:.0%})",
            f"  lookahead right, by rank of the guess: {' '.join(f'{r:.0%}' for r in report['lookahead_recall'])}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
