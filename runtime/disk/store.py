"""Where experts come from: one record, one read, past the page cache, into a cache of bounded size.

Cache, threads and read-ahead decide when a record is read, never what is computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from container.errors import FormatError, MoedockError
from container.reader import ContainerReader
from container.records import ExpertRecord
from runtime.disk.books import Books
from runtime.disk.cache import SlotState
from runtime.disk.direct import DirectFiles, Notice
from runtime.disk.eviction import EvictionPolicy
from runtime.disk.learning import hand_on, learnt
from runtime.disk.loading import SlotLoader
from runtime.disk.readers import Cause, Load
from runtime.disk.tally import Statistics
from runtime.memory.plan import minimum_slots
from runtime.options import RunOptions


class Request:
    """Experts of one layer that were asked for at once. Only the store looks inside."""

    def __init__(self, layer: int, experts: Sequence[int], *, window: int) -> None:
        self.layer = layer
        self.experts = [int(expert) for expert in experts]
        self.slots: dict[int, int] = {}  # index into experts → its slot, pinned
        self.loads: dict[int, Load] = {}  # index → the read that fills that slot, until the record is taken
        self.taken: set[int] = set()  # indices whose record was used and given back
        self.n_begun = 0  # every index below has been given a slot
        self.window = window  # most of `loads` before the index to begin next


class ExpertStore:
    """Expert records of an opened container, for one thread that computes; `n_readers` more threads read.

    `cache_bytes` become slots of one record each; by default as few as it takes. With `verify` each record's crc32 is
    checked when it is read. `usage.waste` is read if there is one, so that the cache starts warm, and with `learn` it
    is written on closing. `notice` is given lines for a person. Raises MoedockError when `cache_bytes` are too few.

    One request is open at a time: asking for more ends the former, whose records must not be used any longer.
    After an error of a read the store can be used as before, and so it can when an interrupt raised an exception in
    the computing thread, wherever that was: some records may then have to be read again.
    """

    def __init__(
        self,
        reader: ContainerReader,
        *,
        cache_bytes: int | None = None,
        n_readers: int = RunOptions.readers,
        verify: bool = False,
        learn: bool = False,
        files: DirectFiles | None = None,
        notice: Notice = lambda line: None,
    ) -> None:
        self._reader = reader
        self._learn, self._notice = learn, notice
        n_slots = _n_slots(reader, cache_bytes)
        self._policy = EvictionPolicy(sorted(reader.manifest.layers), reader.model.moe.n_experts)
        self._before = learnt(reader.folder, self._policy, notice)
        self._own_files = files is None
        self._files = files or DirectFiles(reader.folder, notice)
        self._open: Request | None = None
        self._is_closed = False
        self._ahead = 2 * n_readers  # records of a stream on their way
        self._books = Books(self._repair)
        self._loader = SlotLoader(
            reader,
            self._files,
            self._policy,
            self._books,
            n_slots=n_slots,
            n_readers=n_readers,
            verify=verify,
            warm=[self._policy.expert(key) for key in self._policy.hottest()[:n_slots].tolist()],
        )
        self._table, self._lock, self._counts = self._loader.table, self._loader.lock, self._loader.counts

    @property
    def n_slots(self) -> int:
        """Records that the cache has room for."""
        return self._table.n_slots

    @property
    def statistics(self) -> Statistics:
        """What happened so far."""
        with self._lock:
            return replace(self._counts, busy_seconds=self._loader.readers.busy_seconds)

    def request(self, layer: int, experts: Sequence[int]) -> Request:
        """Ask for distinct `experts` of a layer, for one token; what is not in memory is being read from now on.

        Raises FormatError for a layer or an expert that the container has not.
        """
        return self._requested(Request(layer, experts, window=len(experts)), None)

    def arrivals(self, request: Request) -> Iterator[list[tuple[int, ExpertRecord]]]:
        """(index into the request's experts, record), each once: all that are there, as soon as there is one.

        Records are valid until the iterator's next step. Raises FormatError for a bad record, IntegrityError for a
        wrong crc32; either names layer and expert. The request ends with the iterator.
        """
        waiting = list(range(len(request.experts)))
        try:
            while waiting:
                there = self._wait(request, waiting)
                yield [(index, self._loader.record(request.slots[index])) for index in there]
                self._take_back(request, there)
                waiting = [index for index in waiting if index not in there]
        finally:
            self._end(request)

    def stream(self, layer: int, experts: Sequence[int], uses: Sequence[int] | None = None) -> Iterator[ExpertRecord]:
        """The records of distinct `experts` of a layer in this order, for a chunk of tokens; some are read ahead.

        `uses`: how many tokens want each, for what the cache learns. Validity and errors as for `arrivals`.
        """
        request = self._requested(Request(layer, experts, window=min(self._ahead, len(experts))), uses)
        try:
            for index in range(len(request.experts)):
                self._wait(request, [index])
                yield self._loader.record(request.slots[index])
                self._take_back(request, [index])
        finally:
            self._end(request)

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Experts that will probably be asked for soon, the likeliest first: read when no demand waits, if at all.

        Raises FormatError for a layer or an expert that the container has not.
        """
        self._check(layer, experts)
        with self._lock, self._books:
            self._check_open()
            self._policy.expect(layer, experts)
            for expert in experts:
                if self._table.find(self._policy.key(layer, int(expert))) is None:
                    load = self._loader.start(layer, int(expert), Cause.AHEAD)
                    if load is None:
                        self._counts.ahead_dropped += 1

    def forget(self) -> None:
        """Empty the cache; for measuring what reading costs."""
        with self._lock, self._books:
            self._loader.forget()

    def close(self) -> None:
        """End the threads, and write usage.waste if so wished. Whoever waits for a record gets a MoedockError."""
        self._is_closed = True
        self._loader.close()
        learn, self._learn = self._learn, False  # an interrupted call may be repeated
        if learn:
            hand_on(self._reader.folder, self._policy, self._before, self._notice)
        if self._own_files:
            self._files.close()

    def _requested(self, request: Request, uses: Sequence[int] | None) -> Request:
        self._check(request.layer, request.experts)
        top_k = self._reader.model.moe.top_k
        n_tokens = 1 if uses is None else max(sum(uses) // top_k, 1)
        with self._lock, self._books:
            self._check_open()
            if self._open is not None:
                self._release(self._open)
            self._open = request
            self._policy.use(request.layer, request.experts, uses, n_tokens)
            self._loader.drop_ahead(request.layer, request.experts)
            self._pin_cached(request)
            self._begin(request)
        return request

    def _pin_cached(self, request: Request) -> None:
        """Keep what is in memory from being evicted for the rest, but leave that room to be read."""
        found = [self._table.find(self._policy.key(request.layer, expert)) for expert in request.experts]
        room = self._table.n_slots - min(found.count(None), request.window)
        for index, slot in enumerate(found):
            if slot is not None and len(request.slots) < room:
                self._attach(request, index, slot)

    def _begin(self, request: Request) -> None:
        """Start reads, in the order of the request, as far as its window and the slots allow."""
        while request.n_begun < len(request.experts):
            index = request.n_begun
            if index not in request.slots and index not in request.taken:
                if sum(other < index for other in request.loads) >= request.window:
                    return
                layer, expert = request.layer, request.experts[index]
                slot = self._table.find(self._policy.key(layer, expert))
                if slot is None:
                    load = self._loader.start(layer, expert, Cause.DEMAND)
                    if load is None:
                        return
                    slot = load.slot
                self._attach(request, index, slot)
            request.n_begun += 1

    def _attach(self, request: Request, index: int, slot: int) -> None:
        load = self._loader.pending(slot)
        if load is None:
            self._counts.n_hits += 1
        else:
            self._counts.n_misses += 1
            self._counts.n_late += load.is_begun and load.cause is not Cause.DEMAND
            request.loads[index] = load
        self._loader.demanded(slot)
        self._table.pin(slot)
        request.slots[index] = slot

    def _wait(self, request: Request, waiting: Sequence[int]) -> list[int]:
        """Those of `waiting` whose records are there, as soon as there is one."""
        while True:
            with self._lock, self._books:
                self._loader.readers.arrived.silence()
                there = self._there(request, waiting)
            if there:
                return there
            start = time.perf_counter()
            try:
                self._loader.readers.arrived.wait()
            finally:
                self._counts.wait_seconds += time.perf_counter() - start

    def _there(self, request: Request, waiting: Sequence[int]) -> list[int]:
        """Those of `waiting` whose records are there."""
        self._check_open()
        if self._open is not request:
            raise ValueError(f"the request for experts of layer {request.layer} has ended")
        self._begin(request)
        there = []
        for index in waiting:
            load = request.loads.get(index)
            if load is not None and load.error is not None:
                raise load.error
            slot = request.slots.get(index)
            if slot is not None and self._table.state(slot) is SlotState.READY:
                there.append(index)
        return there

    def _take_back(self, request: Request, indices: Sequence[int]) -> None:
        with self._lock, self._books:
            if self._open is request:
                for index in indices:
                    request.taken.add(index)
                    request.loads.pop(index, None)
                    self._table.unpin(request.slots.pop(index))

    def _end(self, request: Request) -> None:
        with self._lock, self._books:
            if self._open is request:
                self._release(request)

    def _repair(self) -> None:
        self._open = None
        self._loader.restore()

    def _release(self, request: Request) -> None:
        """Unpin all that was not taken, and give up what is not being read yet."""
        self._open = None
        for slot in request.slots.values():
            self._table.unpin(slot)
        for load in request.loads.values():
            self._loader.cancel(load)
        request.slots.clear()
        request.loads.clear()

    def _check(self, layer: int, experts: Sequence[int]) -> None:
        bank = self._reader.bank(layer)
        for expert in experts:
            if not 0 <= expert < bank.n_experts:
                raise FormatError(
                    f"{self._reader.folder / bank.file}: there is no expert {expert}, only {bank.n_experts}"
                )

    def _check_open(self) -> None:
        if self._is_closed:
            raise MoedockError(f"{self._reader.folder}: the expert store is closed")


def _n_slots(reader: ContainerReader, cache_bytes: int | None) -> int:
    """Slots for `cache_bytes`. Raises MoedockError when they are too few."""
    stride_bytes = reader.layout.stride_bytes
    n_records = len(reader.manifest.layers) * reader.model.moe.n_experts
    least = minimum_slots(reader.model.moe.top_k, n_records)
    if cache_bytes is None:
        return least
    n_slots = min(cache_bytes // stride_bytes, n_records)
    if n_slots < least:
        raise MoedockError(
            f"{reader.folder}: an expert cache of {cache_bytes} bytes has room for {n_slots} experts; at least {least} "
            f"are needed, {least * stride_bytes} bytes: give a larger budget"
        )
    return n_slots
