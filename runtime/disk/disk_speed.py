"""How fast experts come from disk when none is cached: through the store, and by plain reads of the same records."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from container.reader import ContainerReader
from runtime.disk.direct import DirectFiles, arena
from runtime.disk.loading import Expert
from runtime.disk.store import ExpertStore


@dataclass(frozen=True)
class ColdReads:
    """Seconds for the same `n_bytes` of records, read in both ways; medians of several turns."""

    n_bytes: int
    store_seconds: float
    plain_seconds: float

    @property
    def store_gb_per_second(self) -> float:
        """10⁹ bytes per second through the store."""
        return self.n_bytes / self.store_seconds / 1e9

    @property
    def plain_gb_per_second(self) -> float:
        """10⁹ bytes per second by plain reads."""
        return self.n_bytes / self.plain_seconds / 1e9


def plain_read(reader: ContainerReader, records: Sequence[Expert], n_threads: int) -> float:
    """Seconds in which `n_threads` threads read all `records`, with nothing else to do. Raises FormatError.

    They take turns in as much memory as the smallest cache has: a buffer per thread would stay in the processor's
    cache, which is faster to read into, and which no use of the records could keep up.
    """
    stride_bytes = reader.layout.stride_bytes
    n_buffers = max(2 * reader.model.moe.top_k, n_threads)
    memory = arena(n_buffers * stride_bytes)
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 1  # the first touch of memory is no reading
    left = list(enumerate(records))[::-1]
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while left and not errors:
                n, (layer, expert) = left.pop()
                start = n % n_buffers * stride_bytes
                files.read_aligned(reader.bank(layer).file, memory[start : start + stride_bytes], expert * stride_bytes)
        except IndexError:
            return  # another thread took the last one
        except BaseException as error:  # raised again below
            errors.append(error)

    with DirectFiles(reader.folder, lambda line: None) as files:
        threads = [threading.Thread(target=work) for _ in range(n_threads)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return seconds


def cold_read(store: ExpertStore, requests: Sequence[tuple[int, Sequence[int]]]) -> float:
    """Seconds for (layer, experts) `requests` one after the other, the cache being emptied before each."""
    start = time.perf_counter()
    for layer, experts in requests:
        store.forget()
        for _ in store.arrivals(store.request(layer, experts)):
            pass
    return time.perf_counter() - start


def compare_cold_reads(reader: ContainerReader, *, n_readers: int, n_bytes: int, n_turns: int = 5) -> ColdReads:
    """Read about `n_bytes` as decoding would with nothing cached, and the same records plainly, by turns.

    The layers come in their order, top_k experts each. Raises FormatError for a bad record.
    """
    requests = _requests(reader, n_bytes)
    records = [(layer, expert) for layer, experts in requests for expert in experts]
    store_seconds, plain_seconds = [], []
    store = ExpertStore(reader, n_readers=n_readers)
    try:
        cold_read(store, requests[:1])  # the first touch of memory is no reading
        for _ in range(n_turns):
            plain_seconds.append(plain_read(reader, records, n_readers))
            store_seconds.append(cold_read(store, requests))
    finally:
        store.close()
    return ColdReads(len(records) * reader.layout.stride_bytes, median(store_seconds), median(plain_seconds))


def _requests(reader: ContainerReader, n_bytes: int) -> list[tuple[int, list[int]]]:
    """Requests of top_k experts, of every layer in turn, that differ from token to token, for `n_bytes` in all."""
    moe, layers = reader.model.moe, sorted(reader.manifest.layers)
    n_requests = max(n_bytes // (moe.top_k * reader.layout.stride_bytes), len(layers))
    requests = []
    for n in range(n_requests):
        first = n // len(layers) * moe.top_k
        experts = sorted((first + i) % moe.n_experts for i in range(moe.top_k))
        requests.append((layers[n % len(layers)], experts))
    return requests
