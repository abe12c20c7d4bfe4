"""How fast a container runs on this machine, and how near it comes to what the disk alone can do.

The prompt is made of ids drawn by a fixed seed, the answer is greedy: two runs with the same options do the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from container.machine import peak_memory
from container.progress import size
from runtime.compute.gates import F32
from runtime.disk.disk_speed import compare_cold_reads
from runtime.disk.tally import Statistics
from runtime.engine import Engine
from runtime.state import SequenceState

_MOST_COLD_BYTES = 1 << 30  # read twice, once through a store and once plainly


@dataclass(frozen=True)
class _Phase:
    """Tokens taken in one way."""

    n_tokens: int
    seconds: float
    used: Statistics
    logits: F32  # [vocabulary] after the last token

    @classmethod
    def measured(cls, engine: Engine, n_tokens: int, work: Callable[[], F32]) -> _Phase:
        before, start = engine.store.statistics, perf_counter()
        logits = work()
        return cls(n_tokens, perf_counter() - start, engine.store.statistics - before, logits)

    @property
    def tokens_per_second(self) -> float:
        return self.n_tokens / self.seconds

    @property
    def read_gb_per_second(self) -> float:
        """Over the whole time, computing included."""
        return self.used.read_bytes / self.seconds / 1e9


def bench(engine: Engine, *, n_prompt: int, n_tokens: int, n_readers: int) -> dict[str, Any]:
    """Read a prompt of `n_prompt` tokens and make `n_tokens` more; then read experts with nothing else to do.

    Sizes are in bytes, GB are 10⁹ bytes. Raises MoedockError where the context has no room, or for a bad record.
    """
    ids = np.random.default_rng(0).integers(0, engine.vocab_size, n_prompt).tolist()
    _warm_up(engine, ids)
    state = engine.new_state()
    prefill = _Phase.measured(engine, n_prompt, lambda: engine.feed(state, ids))
    hits, trials = list(engine.recall.hits), engine.recall.trials
    decode = _Phase.measured(engine, n_tokens, lambda: _decoded(engine, state, prefill.logits, n_tokens))
    return {
        "prompt_tokens": n_prompt,
        "prefill_seconds": prefill.seconds,
        "prefill_tokens_per_second": prefill.tokens_per_second,
        "prefill_read_bytes": prefill.used.read_bytes,
        "prefill_read_gb_per_second": prefill.read_gb_per_second,
        "tokens": n_tokens,
        "decode_seconds": decode.seconds,
        "decode_tokens_per_second": decode.tokens_per_second,
        "hit_rate": decode.used.hit_rate,
        "bytes_per_token": decode.used.read_bytes / n_tokens,
        "working_set_bytes": engine.plan.working_set_bytes,
        "read_gb_per_second": decode.read_gb_per_second,
        "while_reading_gb_per_second": decode.used.read_gb_per_second,
        "wait_share": decode.used.wait_seconds / decode.seconds,
        "lookahead_recall": _recall(engine, hits, trials),
        "lookahead_reads": decode.used.ahead_reads,
        "lookahead_reads_used": decode.used.ahead_used,
        "budget_bytes": engine.budget_bytes,
        "floor_bytes": engine.plan.floor_bytes,
        "cache_bytes": engine.plan.cache_bytes(engine.budget_bytes),
        "peak_memory_bytes": peak_memory(),  # of running: the reads below have memory of their own
        "threads": engine.plan.n_threads,
        "readers": n_readers,
        "context": engine.context,
        "chunk": engine.chunk,
        **_cold_reads(engine, n_readers),
    }


def _warm_up(engine: Engine, ids: list[int]) -> None:
    """Take a few tokens both ways, so that compiled code is loaded and memory touched."""
    state = engine.new_state()
    _decoded(engine, state, engine.feed(state, ids[:2]), 1)


def _decoded(engine: Engine, state: SequenceState, logits: F32, n_tokens: int) -> F32:
    """Take the likeliest token `n_tokens` times."""
    for _ in range(n_tokens):
        logits = engine.step(state, int(np.argmax(logits)))
    return logits


def _cold_reads(engine: Engine, n_readers: int) -> dict[str, float]:
    """Reading as decoding does, but with nothing cached and nothing computed, against plain reads."""
    banks_bytes = sum(bank.n_bytes for bank in engine.reader.manifest.layers.values())
    cold = compare_cold_reads(engine.reader, n_readers=n_readers, n_bytes=min(_MOST_COLD_BYTES, banks_bytes))
    return {
        "cold_read_gb_per_second": cold.store_gb_per_second,
        "plain_read_gb_per_second": cold.plain_gb_per_second,
        "cold_share_of_plain": cold.plain_seconds / cold.store_seconds,
    }


def _recall(engine: Engine, hits_before: list[int], trials_before: int) -> list[float]:
    """By rank of the guess: how often an expert that the lookahead expected was really chosen."""
    trials = engine.recall.trials - trials_before
    if not trials:
        return []
    return [(now - then) / trials for now, then in zip(engine.recall.hits, hits_before, strict=True)]


def bench_text(report: dict[str, Any]) -> str:
    """The same figures for people."""
    recall = " ".join(f"{share:.0%}" for share in report["lookahead_recall"])
    rows = {
        "load": f"{report['load_seconds']:.2f} s, trunk {size(report['trunk_bytes'])} "
        f"({report['load_gb_per_second']:.2f} GB/s)",
        "prefill": f"{report['prefill_tokens_per_second']:.2f} tokens/s ({report['prompt_tokens']} tokens, "
        f"{report['prefill_seconds']:.2f} s, {size(report['prefill_read_bytes'])} read)",
        "decode": f"{report['decode_tokens_per_second']:.2f} tokens/s ({report['tokens']} tokens, "
        f"{report['decode_seconds']:.2f} s)",
        "experts": f"{report['hit_rate']:.1%} hits, {size(report['bytes_per_token'])} read a token, of a working set "
        f"of {size(report['working_set_bytes'])}",
        "disk": f"{report['read_gb_per_second']:.2f} GB/s while decoding ({report['while_reading_gb_per_second']:.2f} "
        f"GB/s while reading; {report['wait_share']:.0%} of the time waited for)",
        "reads alone": f"{report['cold_read_gb_per_second']:.2f} GB/s with nothing cached, "
        f"{report['cold_share_of_plain']:.0%} of the {report['plain_read_gb_per_second']:.2f} GB/s of plain reads",
        "lookahead": f"right by rank {recall or '-'}; {report['lookahead_reads_used']} of "
        f"{report['lookahead_reads']} reads used",
        "memory": f"peak {size(report['peak_memory_bytes'])} of a budget of {size(report['budget_bytes'])} (floor "
        f"{size(report['floor_bytes'])}, expert cache {size(report['cache_bytes'])})",
        "with": f"{report['threads']} threads, {report['readers']} readers, context {report['context']}, chunk "
        f"{report['chunk']}",
    }
    return "\n".join(f"{name + ':':<12} {value}" for name, value in rows.items())
