"""Hit rates of the expert cache on a recorded routing: ours, its bounds, and what was published for it.

The trace is of Kimi-Linear: 300 tokens, 26 layers, 8 of 256 experts each. A cache starts empty, loads on demand only,
and the whole trace counts. The slots and the policy are the store's own. Run as
`python -m tests.benchmarks.cache_trace`; half a minute.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.disk.cache import SlotTable
from runtime.disk.eviction import EvictionPolicy

TRACE = Path(__file__).parents[3] / "shared" / "data" / "kimi-linear" / "routing_trace_300.jsonl"
N_EXPERTS = 256
# Share of all experts that the cache holds → published hit rate, in percent.
PUBLISHED = {3: 29.4, 6: 40.6, 12: 54.9, 24: 71.9, 48: 87.4}

Trace = npt.NDArray[np.int64]  # [tokens, layers, k]
Values = npt.NDArray[np.float64]  # per key: the lowest is evicted


def main() -> int:
    if not TRACE.is_file():
        print(f"\nhit rates on a recorded routing: not simulated, there is no {TRACE.name}")
        return 0
    trace = read_trace(TRACE)
    _, n_layers, k = trace.shape
    print(f"\nhit rates in % on a recorded routing ({len(trace)} tokens, {n_layers} layers, {k} of {N_EXPERTS}), cold")
    columns = ("cache", "published", "ours", "LRU", "LFU", "Belady", "2nd half", "2nd, warm")
    print("".join(f"{name:>12}" for name in columns))
    for share, published in PUBLISHED.items():
        n_slots = slots_of(share, trace)
        rates = [simulated(trace, n_slots) for simulated in (hit_rate, recency, frequency, belady)]
        rates += [hit_rate(trace[len(trace) // 2 :], n_slots), warm_hit_rate(trace, n_slots)]
        print(f"{share:>10} %{published:12.1f}" + "".join(f"{100 * rate:12.2f}" for rate in rates), flush=True)
    print("2nd half: ours, cold, on the second half of the trace alone; warm: after what the first half taught")
    return 0


def read_trace(path: Path) -> Trace:
    """Chosen experts [tokens, layers, k]."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return np.array([json.loads(line)["layers"] for line in lines], dtype=np.int64)


def slots_of(share: int, trace: Trace) -> int:
    """Slots of a cache for `share` percent of all experts."""
    return round(trace.shape[1] * N_EXPERTS * share / 100)


def hit_rate(trace: Trace, n_slots: int, *, policy: EvictionPolicy | None = None, seed: int = 0) -> float:
    """Share of requested experts that lie in the cache when they are requested; the store's own classes."""
    policy = policy or EvictionPolicy(range(trace.shape[1]), N_EXPERTS, seed=seed)
    table = SlotTable(n_slots, policy)
    n_hits = 0
    for key in policy.hottest()[:n_slots].tolist():
        slot = table.take(key)
        assert slot is not None
        table.loaded(slot)
    for token in trace.tolist():
        for layer, experts in enumerate(token):
            policy.use(layer, experts)
            keys = [policy.key(layer, expert) for expert in experts]
            found = {key: table.find(key) for key in keys}
            pinned = [slot for slot in found.values() if slot is not None]
            n_hits += len(pinned)
            for slot in pinned:
                table.pin(slot)
            for key in keys:
                if found[key] is None:
                    slot = table.take(key)
                    assert slot is not None
                    table.pin(slot)
                    table.loaded(slot)
                    pinned.append(slot)
            for slot in pinned:
                table.unpin(slot)
    return n_hits / trace.size


def warm_hit_rate(trace: Trace, n_slots: int) -> float:
    """Hit rate of the second half with a cache that was filled from the counts of the first."""
    half = len(trace) // 2
    teacher = EvictionPolicy(range(trace.shape[1]), N_EXPERTS)
    for token in trace[:half].tolist():
        for layer, experts in enumerate(token):
            teacher.use(layer, experts)
    policy = EvictionPolicy(range(trace.shape[1]), N_EXPERTS)
    policy.learn(teacher.counted()[0], half)
    return hit_rate(trace[half:], n_slots, policy=policy)


def recency(trace: Trace, n_slots: int) -> float:
    """Hit rate when the least recently used expert is evicted."""

    def touch(values: Values, keys: Trace, step: int) -> None:
        values[keys] = step

    return _simulated(trace, n_slots, touch)


def frequency(trace: Trace, n_slots: int) -> float:
    """Hit rate when the least frequently used expert is evicted, of several the least recently used."""
    uses = np.zeros(trace.shape[1] * N_EXPERTS)

    def touch(values: Values, keys: Trace, step: int) -> None:
        uses[keys] += 1
        values[keys] = uses[keys] + step * 1e-9

    return _simulated(trace, n_slots, touch)


def belady(trace: Trace, n_slots: int) -> float:
    """Hit rate when the expert is evicted whose next use is farthest off: no policy can do better."""
    requests = _requests(trace)
    following = np.full(trace.shape[1] * N_EXPERTS, len(requests))
    next_uses = np.empty_like(requests)
    for step in range(len(requests) - 1, -1, -1):
        next_uses[step] = following[requests[step]]
        following[requests[step]] = step

    def touch(values: Values, keys: Trace, step: int) -> None:
        values[keys] = -next_uses[step]

    return _simulated(trace, n_slots, touch)


def _requests(trace: Trace) -> Trace:
    """Keys [requests, k], in the order of the requests."""
    return (trace + N_EXPERTS * np.arange(trace.shape[1])[:, None]).reshape(-1, trace.shape[2])


def _simulated(trace: Trace, n_slots: int, touch: Callable[[Values, Trace, int], None]) -> float:
    """Hit rate when the key of the lowest value goes; `touch` sets the values of the keys requested in a step."""
    values = np.zeros(trace.shape[1] * N_EXPERTS)
    cached = np.zeros(len(values), dtype=np.bool_)
    n_hits = 0
    for step, keys in enumerate(_requests(trace)):
        missing = keys[~cached[keys]]
        n_hits += len(keys) - len(missing)
        touch(values, keys, step)
        cached[keys] = False  # so that none of this request is evicted
        n_out = cached.sum() + len(keys) - n_slots
        if n_out > 0:
            rest = np.flatnonzero(cached)
            cached[rest[np.argsort(values[rest], kind="stable")[:n_out]]] = False
        cached[keys] = True
    return n_hits / trace.size


if __name__ == "__main__":
    sys.exit(main())
