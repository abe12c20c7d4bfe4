"""The expert store: what it delivers is what the bank holds, whatever it caches and however it reads."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from container.errors import FormatError, IntegrityError, MoedockError
from container.layout import USAGE_NAME, bank_name
from container.reader import ContainerReader
from container.records import ExpertRecord
from container.usage import read_usage
from runtime.disk import books, cache, disk_speed, eviction, loading, readers
from runtime.disk import store as store_module
from runtime.disk.direct import DirectFiles
from runtime.disk.store import ExpertStore
from tests.runtime.interrupts import interrupted_everywhere

N_EXPERTS, TOP_K = 8, 2
LAYERS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def reader(kimi_linear: Path) -> Iterator[ContainerReader]:
    with ContainerReader.open(kimi_linear) as reader:
        assert (reader.model.moe.n_experts, reader.model.moe.top_k) == (N_EXPERTS, TOP_K)
        assert tuple(sorted(reader.manifest.layers)) == LAYERS
        yield reader


@pytest.fixture(scope="module")
def contents(reader: ContainerReader) -> dict[tuple[int, int], str]:
    """A digest of every record, read without a store."""
    return {(layer, expert): flat(reader.read_expert(layer, expert)) for layer in LAYERS for expert in range(N_EXPERTS)}


def flat(record: ExpertRecord) -> str:
    parts = (*record.indices.values(), *record.scales.values())
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


@pytest.fixture
def own(kimi_linear: Path, tmp_path: Path) -> Path:
    """A copy of the container that a test may damage."""
    return Path(shutil.copytree(kimi_linear, tmp_path / "container"))


@contextmanager
def opened(reader: ContainerReader, n_slots: int | None = None, **options: object) -> Iterator[ExpertStore]:
    cache_bytes = None if n_slots is None else n_slots * reader.layout.stride_bytes
    before = set(threading.enumerate())
    store = ExpertStore(reader, cache_bytes=cache_bytes, **options)  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.close()
    assert set(threading.enumerate()) <= before


class GatedFiles(DirectFiles):
    """Reads wait for `gate`, and are written down."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, lambda line: None)
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.log: list[tuple[str, int]] = []

    def read_aligned(self, name: str, target: memoryview, offset: int) -> None:
        self.log.append((name, offset // len(target)))
        self.begun.release()
        assert self.gate.acquire(timeout=20)
        super().read_aligned(name, target, offset)


@contextmanager
def gated(reader: ContainerReader, n_slots: int | None = None) -> Iterator[tuple[ExpertStore, GatedFiles]]:
    """A store with one thread that reads, whose reads wait for the test."""
    with GatedFiles(reader.folder) as files:
        store = ExpertStore(
            reader,
            cache_bytes=None if n_slots is None else n_slots * reader.layout.stride_bytes,
            n_readers=1,
            files=files,
        )
        try:
            yield store, files
        finally:
            files.gate.release(1000)
            store.close()


def taken(store: ExpertStore, layer: int, experts: list[int]) -> dict[int, str]:
    """All records of a request, by expert."""
    return {experts[index]: flat(record) for index, record in one_by_one(store.arrivals(store.request(layer, experts)))}


operations = st.lists(
    st.tuples(
        st.sampled_from(["request", "request", "stream", "one by one", "leave", "forget"]),
        st.lists(st.integers(0, N_EXPERTS - 1), unique=True, max_size=N_EXPERTS),
        st.lists(st.integers(0, N_EXPERTS - 1), unique=True, max_size=6),
    ),
    max_size=30,
)


@given(
    operations=operations,
    n_slots=st.one_of(st.none(), st.integers(4, 40)),
    n_readers=st.sampled_from([1, 2, 5]),
    verify=st.booleans(),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_what_is_delivered_is_what_the_bank_holds(
    reader: ContainerReader,
    contents: dict[tuple[int, int], str],
    operations: list[tuple[str, list[int], list[int]]],
    n_slots: int | None,
    n_readers: int,
    verify: bool,
    seed: int,
) -> None:
    """Any calls in any order, with any cache and any timing of the reads."""
    jitter = random.Random(seed)

    class SlowFiles(DirectFiles):
        def read_aligned(self, name: str, target: memoryview, offset: int) -> None:
            target[:] = b"\xaa" * len(target)
            if jitter.random() < 0.3:
                time.sleep(jitter.random() * 1e-3)
            super().read_aligned(name, target, offset)

    n_asked, complete = 0, True
    with (
        SlowFiles(reader.folder, lambda line: None) as files,
        opened(reader, n_slots, n_readers=n_readers, verify=verify, files=files) as store,
    ):
        for step, (what, experts, likely) in enumerate(operations):
            layer = LAYERS[step % len(LAYERS)]
            if what == "stream":
                for expert, record in zip(experts, store.stream(layer, experts, [1] * len(experts)), strict=True):
                    assert flat(record) == contents[layer, expert]
            elif what == "one by one":
                for expert in experts[:2]:
                    assert taken(store, layer, [expert]) == {expert: contents[layer, expert]}
            elif what == "forget":
                store.forget()
            else:
                request = store.request(layer, experts)
                store.prefetch(LAYERS[(step + 1) % len(LAYERS)], likely)
                left = set(range(len(experts)))
                for index, record in one_by_one(store.arrivals(request)):
                    assert flat(record) == contents[layer, experts[index]]
                    left.remove(index)
                    if what == "leave":
                        complete = False
                        break
                assert what == "leave" or not left
            n_asked += {"forget": 0, "one by one": len(experts[:2])}.get(what, len(experts))
        done = store.statistics
    assert done.n_hits + done.n_misses <= n_asked
    assert done.read_bytes == done.n_reads * reader.layout.stride_bytes
    assert done.ahead_used <= done.ahead_reads + done.n_late
    if complete:
        assert done.n_hits + done.n_misses == n_asked
        assert done.demand_reads + done.n_late == done.n_misses


def test_a_cache_for_everything_reads_everything_once(reader: ContainerReader) -> None:
    with opened(reader, 10**6) as store:
        assert store.n_slots == N_EXPERTS * len(LAYERS)
        for _ in range(3):
            for layer in LAYERS:
                taken(store, layer, [0, 3, 5])
        first = store.statistics
        assert (first.n_hits, first.n_misses, first.demand_reads) == (24, 12, 12)
        assert first.hit_rate == pytest.approx(2 / 3)
        assert first.wait_seconds > 0
        assert first.busy_seconds > 0
        store.forget()
        taken(store, 1, [0])
        more = store.statistics - first
        assert (more.n_hits, more.n_misses, more.read_bytes) == (0, 1, reader.layout.stride_bytes)


def test_demand_goes_before_lookahead_and_waits_for_a_read_that_has_begun(reader: ContainerReader) -> None:
    with gated(reader, 20) as (store, files):
        store.prefetch(2, [5, 6, 7])
        files.begun.acquire()
        request = store.request(1, [1, 2])
        files.gate.release(1000)
        assert {index for index, _ in one_by_one(store.arrivals(request))} == {0, 1}
        assert files.log[:3] == [(bank_name(2), 5), (bank_name(1), 1), (bank_name(1), 2)]
        assert set(taken(store, 2, [5, 6])) == {5, 6}
        done = store.statistics
        assert sorted(files.log).count((bank_name(2), 5)) == 1
        assert done.ahead_used >= 1
        assert done.n_hits + done.n_misses == 4


def test_a_read_ahead_that_is_under_way_is_waited_for(reader: ContainerReader) -> None:
    with gated(reader, 20) as (store, files):
        store.prefetch(1, [4])
        files.begun.acquire()
        request = store.request(1, [4])
        files.gate.release(1000)
        assert len(list(one_by_one(store.arrivals(request)))) == 1
        done = store.statistics
        assert files.log == [(bank_name(1), 4)]
        assert (done.n_hits, done.n_misses, done.n_late, done.ahead_used, done.ahead_reads) == (0, 1, 1, 1, 1)


def test_lookahead_is_dropped_where_it_was_wrong_or_in_the_way(reader: ContainerReader) -> None:
    with gated(reader, 4) as (store, files):
        store.prefetch(1, [0, 1, 2, 3])
        files.begun.acquire()
        request = store.request(1, [1, 7])  # 2 and 3 were wrong, and wait
        assert store.statistics.ahead_dropped == 2
        files.gate.release(1000)
        assert len(list(one_by_one(store.arrivals(request)))) == 2
        assert {expert for _, expert in files.log} == {0, 1, 7}
    with gated(reader, 4) as (store, files):
        store.prefetch(2, [0, 1, 2, 3, 4])  # one has no slot
        files.begun.acquire()
        request = store.request(1, [1, 7])  # takes the slots of the two last
        assert store.statistics.ahead_dropped == 3
        files.gate.release(1000)
        assert len(list(one_by_one(store.arrivals(request)))) == 2
        assert files.log[:3] == [(bank_name(2), 0), (bank_name(1), 1), (bank_name(1), 7)]


def test_a_stream_is_read_ahead(reader: ContainerReader) -> None:
    """While one record is computed, the next are on their way; with one reading thread, two of them."""
    with gated(reader, 10) as (store, files):
        records = store.stream(3, list(range(8)))
        files.gate.release(2)
        next(records)
        for _ in range(2):
            assert files.begun.acquire(timeout=20)
        files.gate.release(1000)
        assert [record.expert for record in records] == list(range(1, 8))
        assert [expert for _, expert in files.log] == list(range(8))


def test_a_stream_goes_on_whatever_is_cached_or_on_its_way(reader: ContainerReader) -> None:
    """Neither cached records that come late nor late ones being read ahead take what the first one needs."""
    with opened(reader, 4) as store:
        taken(store, 1, [4, 5, 6, 7])
        assert [record.expert for record in store.stream(1, list(range(8)))] == list(range(8))
    with gated(reader, 10) as (store, files):
        store.prefetch(1, [6, 7])
        files.begun.acquire()
        records = store.stream(1, list(range(8)))
        files.gate.release(1000)
        assert [record.expert for record in records] == list(range(8))


def test_a_record_that_was_used_is_not_read_again_for_the_same_request(reader: ContainerReader) -> None:
    """A cached one comes first where reads under way leave too few slots for all that come before it."""
    with gated(reader, 4) as (store, files):
        files.gate.release()
        taken(store, 1, [2])
        files.begun.acquire()
        store.prefetch(2, [5])
        files.begun.acquire()
        arrivals = one_by_one(store.arrivals(store.request(1, [0, 1, 3, 2])))
        assert next(arrivals)[0] == 3
        files.gate.release(1000)
        assert [index for index, _ in arrivals] == [0, 1, 2]
        done = store.statistics
        assert (done.n_hits, done.n_misses, done.demand_reads) == (1, 4, 4)
        assert [expert for _, expert in files.log] == [2, 5, 0, 1, 3]


def test_lookahead_that_is_evicted_was_of_no_use(reader: ContainerReader) -> None:
    with opened(reader, 4) as store:
        store.prefetch(2, [0])
        wait_until(lambda: store.statistics.ahead_reads == 1)
        for layer in (3, 3, 4, 4, 1, 1):
            taken(store, layer, [4, 5, 6, 7])
        taken(store, 2, [0])
        assert store.statistics.ahead_used == 0


def damage(folder: Path, layer: int, expert: int, stride: int, at: int) -> None:
    with (folder / bank_name(layer)).open("r+b") as file:
        file.seek(expert * stride + at)
        byte = file.read(1)
        file.seek(expert * stride + at)
        file.write(bytes([byte[0] ^ 0x10]))


def by_request(store: ExpertStore, layer: int, expert: int) -> None:
    taken(store, layer, [expert, (expert + 1) % N_EXPERTS])


def by_stream(store: ExpertStore, layer: int, expert: int) -> None:
    list(store.stream(layer, [*range(expert), expert]))


@pytest.mark.parametrize("ask", [by_request, by_stream])
@pytest.mark.parametrize("how", ["header", "payload", "short", "unreadable"])
def test_a_bad_record_is_named_and_the_store_goes_on(
    own: Path, how: str, ask: Callable[[ExpertStore, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ContainerReader.open(own) as reader, opened(reader, n_readers=2, verify=True) as store:
        stride, preadv = reader.layout.stride_bytes, os.preadv
        if how == "short":
            os.truncate(own / bank_name(2), 7 * stride + 100)
        elif how == "unreadable":
            bad = (own / bank_name(2)).stat().st_ino

            def read(descriptor: int, views: list[memoryview], offset: int) -> int:
                if os.fstat(descriptor).st_ino == bad and offset // stride == 7:
                    raise OSError(5, "broken")
                return preadv(descriptor, views, offset)

            monkeypatch.setattr(os, "preadv", read)
        else:
            damage(own, 2, 7, stride, 4 if how == "header" else 1000)
        for _ in range(2):
            store.prefetch(2, [7])  # what a guess meets is nobody's business
            assert set(taken(store, 1, [0, 1])) == {0, 1}
            with pytest.raises(IntegrityError if how == "payload" else FormatError, match="layer 2 expert 7") as caught:
                ask(store, 2, 7)
            assert bank_name(2) in str(caught.value)
        assert set(taken(store, 2, [0, 1])) == {0, 1}


def test_a_hit_is_not_checked_again(own: Path) -> None:
    with ContainerReader.open(own) as reader, opened(reader, verify=True) as store:
        taken(store, 1, [3])
        damage(own, 1, 3, reader.layout.stride_bytes, 1000)
        taken(store, 1, [3])
        store.forget()
        with pytest.raises(IntegrityError, match="layer 1 expert 3"):
            taken(store, 1, [3])
    with ContainerReader.open(own) as reader, opened(reader) as store:
        taken(store, 1, [3])  # without `verify` only headers are checked


def test_an_interrupt_leaves_the_store_usable(reader: ContainerReader, contents: dict[tuple[int, int], str]) -> None:
    with gated(reader) as (store, files):
        timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            taken(store, 1, [0, 1])
        timer.join()
        files.gate.release(1000)
        for layer in LAYERS:
            assert taken(store, layer, [2, 3]) == {expert: contents[layer, expert] for expert in (2, 3)}
        assert taken(store, 1, [0, 1]) == {expert: contents[1, expert] for expert in (0, 1)}


def test_an_interrupt_at_any_step_leaves_the_store_usable(
    reader: ContainerReader, contents: dict[tuple[int, int], str]
) -> None:
    """No slot is lost, none stays pinned or "loading": with four of them a few such would be the end."""
    turn = iter(range(10**6))

    def work() -> None:
        layer, first = LAYERS[next(turn) % 4], next(turn) % 5
        request = store.request(layer, [first, 7 - first // 2])
        store.prefetch(LAYERS[layer % 4], [first, first + 1, 6])
        assert dict(delivered(store.arrivals(request))) == {
            index: contents[layer, expert] for index, expert in enumerate(request.experts)
        }
        store.forget()
        assert [flat(record) for record in store.stream(layer, [first, 5, 6])] == [
            contents[layer, expert] for expert in (first, 5, 6)
        ]

    modules = [books, cache, eviction, loading, readers, store_module]
    with opened(reader, n_readers=2) as store:
        for place in interrupted_everywhere(work, modules):
            if place % 8 == 0:  # or the next interrupt comes while there is something to repair
                work()
        assert place > 500
        work()


def one_by_one(arrivals: Iterator[list[tuple[int, ExpertRecord]]]) -> Iterator[tuple[int, ExpertRecord]]:
    return (arrived for group in arrivals for arrived in group)


def delivered(arrivals: Iterator[list[tuple[int, ExpertRecord]]]) -> Iterator[tuple[int, str]]:
    return ((index, flat(record)) for index, record in one_by_one(arrivals))


def test_closing_ends_who_waits(reader: ContainerReader) -> None:
    said: list[str] = []

    def wait() -> None:
        try:
            taken(store, 1, [0])
        except MoedockError as error:
            said.append(str(error))

    with gated(reader) as (store, files):
        waiting = threading.Thread(target=wait)
        waiting.start()
        files.begun.acquire()
        closing = threading.Thread(target=store.close)
        closing.start()
        waiting.join(timeout=20)
        assert not waiting.is_alive()
        assert said == [f"{reader.folder}: the expert store is closed"]
        files.gate.release(1000)
        closing.join(timeout=20)
        assert not closing.is_alive()
        store.close()
        for call in (store.request, store.prefetch):
            with pytest.raises(MoedockError, match="is closed"):
                call(1, [0])


def test_a_new_request_ends_the_former(reader: ContainerReader) -> None:
    with opened(reader) as store:
        former = store.arrivals(store.request(1, [0, 1]))
        for layer in LAYERS:  # its slots are free again
            taken(store, layer, [0, 1, 2, 3, 4])
        with pytest.raises(ValueError, match="experts of layer 1 has ended"):
            next(former)
    with gated(reader) as (store, files):
        for layer in LAYERS:
            store.request(layer, [0, 1])  # as after an interrupt: nobody takes them
            if layer == 1:
                files.begun.acquire()
        files.gate.release(1000)
        assert set(taken(store, 4, [0, 1])) == {0, 1}
        assert files.log == [(bank_name(1), 0), (bank_name(4), 0), (bank_name(4), 1)]


def test_what_the_container_has_not(reader: ContainerReader) -> None:
    with opened(reader) as store:
        with pytest.raises(FormatError, match="layer 0 has no expert bank"):
            store.request(0, [1])
        for ask in (store.request, store.prefetch):
            with pytest.raises(FormatError, match="there is no expert 8, only 8"):
                ask(1, [3, 8])


def test_a_cache_that_is_too_small_is_refused(reader: ContainerReader) -> None:
    stride = reader.layout.stride_bytes
    with pytest.raises(MoedockError, match=f"room for 3 experts; at least 4 are needed, {4 * stride} bytes"):
        ExpertStore(reader, cache_bytes=4 * stride - 1)


def test_what_one_run_learns_the_next_begins_with(own: Path) -> None:
    lines: list[str] = []
    with ContainerReader.open(own) as reader:
        with opened(reader, notice=lines.append) as store:
            taken(store, 1, [0, 1])
        assert not (own / USAGE_NAME).exists()
        for n_tokens in (5, 10):
            with opened(reader, 12, learn=True, notice=lines.append) as store:
                wait_until(lambda: store.statistics.warm_reads == (0 if n_tokens == 5 else 7))  # noqa: B023
                for _ in range(5):
                    taken(store, 1, [0, 1])
                    taken(store, 4, [2, 7])
                list(store.stream(2, [3, 4, 5], [3, 3, 4]))
                done = store.statistics
            assert done.demand_reads == (7 if n_tokens == 5 else 0)
            usage = read_usage(own, LAYERS, N_EXPERTS)
            assert usage is not None
            assert usage.n_tokens == n_tokens + n_tokens // 5 * 5
            expected = np.zeros((4, 8), dtype=np.int64)
            expected[0, [0, 1]] = expected[3, [2, 7]] = n_tokens
            expected[1, [3, 4, 5]] = np.array([3, 3, 4]) * n_tokens // 5
            np.testing.assert_array_equal(usage.hits, expected)
            assert usage.last_seen[0, 0] == usage.n_tokens - 5
    assert lines == []


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_counts_of_no_use_are_a_line_and_no_more(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    (own / USAGE_NAME).write_bytes(b"something else, but long enough")
    with ContainerReader.open(own) as reader, opened(reader, learn=True, notice=lines.append) as store:
        taken(store, 1, [0, 1])
        monkeypatch.setattr("runtime.disk.learning.write_usage", refuse)
    assert [line.split(": ")[0] for line in lines] == [str(own / USAGE_NAME)] * 2
    assert "ignored, the expert cache starts empty" in lines[0]
    assert "cannot be written (no room)" in lines[1]


def refuse(*_: object) -> None:
    raise OSError(28, "no room")


def test_cold_reads_are_measured_beside_plain_ones(reader: ContainerReader, own: Path) -> None:
    found = disk_speed.compare_cold_reads(reader, n_readers=2, n_bytes=20 * reader.layout.stride_bytes, n_turns=2)
    assert found.n_bytes == 20 * reader.layout.stride_bytes
    assert found.store_gb_per_second > 0
    assert found.plain_gb_per_second > 0
    with ContainerReader.open(own) as damaged:
        os.truncate(own / bank_name(1), 100)
        with pytest.raises(FormatError, match=bank_name(1)):
            disk_speed.plain_read(damaged, [(1, 0)], 2)
